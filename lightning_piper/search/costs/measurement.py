"""A workload by measurement: every pass of every block runs on this machine, with the inputs of a real step.

The step runs a few times, pass by pass, on the real batch, and a clock measures each pass in these runs. So a
pass has the inputs of a real step, and memory and caches are as earlier passes have left them. The same pass
in a loop on the same inputs would take less time. The measurement keeps only the values that the step keeps.
Layers with equal computations have one result: the median over all of these layers and all runs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_piper.accelerators import seeded
from lightning_piper.capture import flatten
from lightning_piper.common.limits import integer, shown
from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import Code, Interface, PassKey
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.search.costs.block_work import checked_samples, seconds_of, single_part, total, workload
from lightning_piper.search.costs.blocks import BlockCut, blocks_of, text_of
from lightning_piper.search.costs.microbatch_check import meets
from lightning_piper.search.costs.parameters import CACHES, Optimizer, timed, wait
from lightning_piper.search.costs.sequential_run import walk
from lightning_piper.search.costs.workload import Work, Workload

# The machine's speed varies, so a short step runs several times: at most MOST times, in about ENOUGH seconds.
MOST, ENOUGH = 20, 0.7


def measured(
    module: nn.Module,
    batch: Any,
    samples: Sequence[int] = (1, 2),
    calls: int = 5,
    states: float = 2.0,
    cut: BlockCut | None = None,
    clock: Callable[[], float] = time.perf_counter,
    optimizer: Optimizer = torch.optim.AdamW,
) -> Workload:
    """Measure the costs of a training step on this machine. The module is not changed.

    Args:
        module: A LightningModule with real parameters, on the device to be measured.
        batch: The batch of one step, with data.
        samples: Sizes of microbatches to measure. A microbatch has the first samples of the batch. Sizes for
            which the step cannot be traced are left out, and all smaller sizes.
        calls: Smallest number of runs of the step, after one warmup run. The median of each pass counts. A
            short step runs more often: up to `MOST` times.
        states: Bytes of optimizer state for each byte of parameters; 2 for Adam.
        cut: The blocks of the same module and batch, if they are known.
        optimizer: Makes the optimizer of parameters.
        clock: Returns seconds. On a CPU that other processes also use, run one thread and use
            `time.process_time`, which counts only the work of this process.

    Raises:
        CaptureError: The step cannot be captured, tensors have no data, the batch has fewer samples, or
            `samples` or `calls` is not valid.
        Exception: The step cannot be traced for any number in `samples`. The error is the error of the trace.
    """
    if integer(calls) is None or calls < 1:
        raise CaptureError(f"measured(calls={shown(calls)}) is not usable. Give an integer >= 1 [PIPER-P005]")
    cut = cut or blocks_of(module, batch)
    leaves = flatten(batch)[0]
    if any(x.is_meta for x in (*leaves, *cut.module.parameters())):
        raise CaptureError(
            "the costs cannot be measured, because the module or the batch has tensors on the meta device, without "
            "data. Give tensors with data, or calculate the costs: hardware= of search, or analytic with a Hardware "
            "[PIPER-P005]"
        )
    works: dict[tuple[int, int], list[Work]] = {}
    for n in checked_samples(cut, samples):
        if n > cut.step.size:
            raise CaptureError(
                f"measured(samples={shown(samples)}): the batch has only {counted(cut.step.size, 'sample')}. "
                f"Give numbers from 1 to {cut.step.size} [PIPER-P005]"
            )
        passes, zeros = seconds_of_passes(cut, leaves, n, calls, clock)
        times = [total(seconds_of(passes.get(region, {})) for region in block) for block in cut.regions]
        works[n, 1] = [Work(*t[:3], *b, apart=t.apart) for t, b in zip(times, cut.bytes(n), strict=True)]
    return workload(cut, works, states, timed(cut, optimizer, zeros, calls, clock), meet=meets(cut, leaves))


def seconds_of_passes(
    cut: BlockCut, leaves: Sequence[torch.Tensor], samples: int, calls: int, clock: Callable[[], float]
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Measure all passes of a step. `leaves` are the tensors of the batch. `measured` explains the other
    arguments.

    Returns:
        Region -> pass ("F", "B", "BI", "BW") -> seconds. And parameter of `cut.step` -> share of zeros in its
        gradient. If several regions use the parameter, this is the smallest share among their gradients.
    """
    code = cut.step.at(samples)
    cuts = [code.samples(i, Slice(0, samples)) for i in range(len(leaves))]
    given = [x if part is None else x[:samples] for x, part in zip(leaves, cuts, strict=True)]
    device = given[0].device
    tensors = {
        cut.step.canonical[n]: x.detach()
        for n, x in [*cut.module.named_parameters(), *cut.module.named_buffers()]
    }
    texts = {region.index: text_of(code, region.index) for region in code.regions}
    times: dict[tuple[str, str], list[float]] = {}  # (text of the region, pass) -> seconds of each run
    runs: list[float] = []  # seconds of all passes of each run
    zeros: dict[str, float] = {}
    counted: set[int] = set()  # regions whose zeros are in `zeros`

    def run(key: PassKey, of_pass: Code, args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run and time a pass. At the first B of each region, count the zeros in its gradients."""
        wait(device)
        start = clock()
        made = of_pass.run(args)
        wait(device)
        took = clock() - start
        runs[-1] += took
        times.setdefault((texts[key[0]], key[1]), []).append(took)
        if key[1] == "B" and key[0] not in counted:
            counted.add(key[0])
            for name, share in _zeros(code.interface_of(key), of_pass, made):
                zeros[name] = min(share, zeros.get(name, 1.0))
        return made

    # In training, parameters, gradients and states fill the caches at the start of a step, because the update
    # of the previous step has just used them. Here `touched` fills the caches.
    size = min(CACHES, 4 * sum(x.nbytes for x in cut.module.parameters()))
    touched = torch.zeros(size, dtype=torch.uint8, device=device)
    with torch.no_grad(), seeded(0, device):
        for i in itertools.count():
            start = clock()
            runs.append(0.0)
            for split in (False, True):
                touched.add_(1)
                walk(code, tensors, cut.step.inputs(given), run, split=split)
            if i == 0:  # to warm up
                times.clear()
                runs.clear()
            elif i == 1:
                calls = max(calls, min(MOST, int(ENOUGH / max(clock() - start, 1e-9))))
            if i == calls:
                break
    # A pass sometimes takes much more time than usual, but never much less. So the median of whole runs is
    # more than the sum of the passes' medians. The ratio of these two numbers scales the medians.
    each = {key: median(took) for key, took in times.items()}
    whole = sum(each[key] * len(took) for key, took in times.items()) / len(runs)
    more = median(runs) / whole if whole else 1.0
    found: dict[int, dict[str, float]] = {}
    for region, text in texts.items():
        passes = {kind: more * each[text, kind] for kind in ("F", "B", "BI", "BW") if (text, kind) in each}
        found[region] = passes | single_part(code, region, passes)
    return found, zeros


def _zeros(interface: Interface, of_pass: Code, made: Sequence[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Yield (parameter, share of zeros in its gradient) for each gradient that a pass has made."""
    values = iter(made)
    for output, specs in zip(interface.outputs, of_pass.outputs, strict=True):
        bundle = [next(values) for _ in specs]
        for name, x in zip(output.names, bundle, strict=True) if output.kind == Kind.GRAD else ():
            yield name, 1 - int(x.count_nonzero()) / max(1, x.numel())
