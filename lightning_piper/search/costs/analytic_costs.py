"""A workload by calculation: the cost of each block's operations on given hardware.

The code of passes runs on fake tensors, so parameters and batch need no data, and the hardware need not be
present.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import CapturedStep
from lightning_piper.capture.tensor_sharding.shardable_params import find_params
from lightning_piper.capture.tracing.step_trace import fakes_of
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Change, Division
from lightning_piper.ir.regions import Code, Output, PassKey, StepCode
from lightning_piper.ir.values import Partial, Replicated, Sharded, TensorSpec
from lightning_piper.search.costs.block_work import checked_samples, seconds_of, single_part, total, workload
from lightning_piper.search.costs.blocks import TAG, BlockCut, blocks_of, bytes_of, refusal
from lightning_piper.search.costs.operation_costs import Cost, Counting, seconds
from lightning_piper.search.costs.parameters import calculated
from lightning_piper.search.costs.sequential_run import walk
from lightning_piper.search.costs.workload import Work, Workload
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

AXIS = "tp"


def analytic(
    module: nn.Module,
    batch: Any,
    hardware: Hardware,
    samples: Sequence[int] = (1, 2),
    tensor: Sequence[int] = (2, 4, 8),
    states: float = 2.0,
    cut: BlockCut | None = None,
) -> Workload:
    """Calculate the costs of a training step.

    The time of an operation is the longer of the times of its arithmetic and of its memory traffic; see
    `operation_costs`.

    Args:
        module: A LightningModule. Its parameters may be on the meta device.
        batch: The batch of one step.
        hardware: The hardware that the step is to run on.
        samples: Sizes of microbatches for which work is calculated. Sizes for which the step cannot be traced
            are left out, and all smaller sizes.
        tensor: Sizes of a tensor axis, which shards the parameters that `tensor_parallel` proposes. The costs
            are the costs of one device. A size is left out unless it shards the same parameters as the
            smallest possible size. For each size, a number of samples is left out if the sharded step cannot
            be traced for it or for a larger number.
        states: Bytes of optimizer state for each byte of parameters; 2 for Adam.
        cut: The blocks of the same module and batch, if they are known.

    Raises:
        CaptureError: The step cannot be captured, or `samples` is not valid.
        SimulationError: The hardware has no speed for a data type.
        Exception: The step cannot be traced for any number in `samples`. The error is the error of the trace.
    """
    cut = cut or blocks_of(module, batch)
    numbers = checked_samples(cut, samples)
    works = {(n, 1): _works(cut, cut.step, n, hardware) for n in numbers}
    divided: dict[str, Sharded] = {}
    parts: frozenset[str] = frozenset()
    least: dict[int, int] = {}
    for degree in sorted(tensor):
        params = _proposed(cut, degree)
        divided = divided or params
        member = _member(cut, degree, params) if params and params == divided else None
        if member is not None:
            # With few samples, the step may exchange other values, because dimensions have size 1. So skip
            # numbers for which the sharded step cannot be traced, and all smaller numbers.
            few = max((n for n in {1, *numbers} if refusal(member, n) is not None), default=0)
            if kept := [n for n in numbers if n > few]:
                works |= {(n, degree): _works(cut, member, n, hardware, degree) for n in kept}
                least |= {degree: kept[0]} if few else {}
                parts = cut.all_named(member.at(kept[0]).divided)
    return workload(cut, works, states, calculated(cut, hardware, states), parts, least=least)


def _proposed(cut: BlockCut, degree: int) -> dict[str, Sharded]:
    """Return the parameters that `tensor_parallel` would shard over `degree` devices, as name -> its shards;
    empty if it cannot shard any."""
    try:
        return find_params(cut.step.joint_graph, AXIS, degree, {})
    except CaptureError:
        return {}


def _member(cut: BlockCut, degree: int, params: dict[str, Sharded]) -> CapturedStep | None:
    """Return the step of one of `degree` devices that shard these parameters; None if the step cannot be sharded,
    because it computes the scores of a loss in chunks, for example."""
    try:
        return cut.step.divided([Division(AXIS, degree, params)]).member
    except CaptureError:
        return None


def _works(
    cut: BlockCut, step: CapturedStep, samples: int, hardware: Hardware, degree: int = 1
) -> list[Work]:
    """Return the work of each block on a microbatch, on one of `degree` devices along the tensor axis. `step`
    is the step of one such device."""
    code = step.at(samples)
    passes: dict[int, dict[str, float]] = {}
    for (region, kind), costs in costs_of(step, samples, degree).items():
        passes.setdefault(region, {})[kind] = seconds(costs, hardware)
    # Exchanges along the tensor axis split a region into several. The regions of one block share its tags.
    regions = cut.regions if degree == 1 else _regions_by_tag(cut, code)
    exchanged = [sum(_exchanged(code, region, degree) for region in block) for block in regions]
    for region, found in passes.items():
        found |= single_part(code, region, found)
    times = [total(seconds_of(passes.get(region, {})) for region in block) for block in regions]
    return [
        Work(*t[:3], *b, x, t.apart)
        for t, b, x in zip(times, bytes_of(code, regions), exchanged, strict=True)
    ]


def _regions_by_tag(cut: BlockCut, code: StepCode) -> tuple[tuple[int, ...], ...]:
    """Return the regions of each block, in code that has more regions than `cut.step`.

    A region belongs to the block that has its tag in `cut.step`.
    """
    whole = cut.step.at(code.size).regions
    owner: dict[int | None, tuple[int, ...]] = {}
    for block in cut.regions:
        owner |= {whole[region].tags.get(TAG): block for region in block}
    found: dict[tuple[int, ...], list[int]] = {block: [] for block in cut.regions}
    for region in code.regions:
        found[owner[region.tags.get(TAG)]].append(region.index)
    return tuple(tuple(found[block]) for block in cut.regions)


def costs_of(step: CapturedStep, samples: int, degree: int = 1) -> dict[PassKey, list[Cost]]:
    """Return the costs of the operations of each pass of a step with this number of samples: (region, pass)
    -> costs in the order of the operations. A region has F and B, and also BI and BW if its backward pass has
    both parts.

    Args:
        degree: Size of the tensor axis. The costs are per device.
    """
    code = step.at(samples)
    specs = {name: info.spec for name, info in step.params.items()} | step.buffers
    specs |= {name: _part(specs[name], part.dim, degree) for name, (_, part) in code.divided.items()}
    device = next((x.device for x in step.module.parameters() if not x.is_meta), torch.device("cpu"))
    mode, fakes = fakes_of((*specs.values(), *code.batch_specs), device)
    mode.allow_non_fake_inputs = True  # the step's constants are real tensors
    tensors, leaves = dict(zip(specs, fakes, strict=False)), fakes[len(specs) :]
    found: dict[PassKey, list[Cost]] = {}

    def run(key: PassKey, of_pass: Code, args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with Counting() as counting:
            made = of_pass.run(args)
        found[key] = counting.costs
        return made

    def arrive(output: Output, bundle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return an output with the shapes that it has after the exchanges along the tensor axis."""
        if not output.changes:
            return bundle
        return tuple(x.new_empty(_changed(tuple(x.shape), output.changes, degree)) for x in bundle)

    with mode, torch.no_grad():
        for split in (False, True):
            walk(code, tensors, leaves, run, arrive, split)
    return found


def _part(spec: TensorSpec, dim: int, degree: int) -> TensorSpec:
    """Return the spec of one of `degree` shards of a tensor along the dimension `dim`."""
    shape = tuple(n // degree if d == dim else n for d, n in enumerate(spec.shape))
    return TensorSpec.contiguous(shape, spec.dtype)


def _changed(shape: tuple[int, ...], changes: Sequence[Change], degree: int) -> tuple[int, ...]:
    """Return the shape of a device's shard after changes of the tensor's placement along the tensor axis.

    Args:
        shape: The shape of the shard before the changes.
        changes: The changes, in order.
        degree: The size of the tensor axis.
    """
    sizes = list(shape)
    for change in changes:
        if isinstance(change.before, Sharded):
            sizes[change.before.dim] *= degree
        if isinstance(change.after, Sharded):
            sizes[change.after.dim] //= degree
    return tuple(sizes)


def _exchanged(code: StepCode, region: int, degree: int) -> Number:
    """Return the bytes of the exchanges along the tensor axis after the forward pass of a region.

    An all-reduce counts with the bytes of the whole tensor. A gather, an all-to-all or a reduce-scatter
    counts with half of these bytes. Sharding a replicated tensor costs nothing. For a region without a
    forward pass, return 0.
    """
    found: Number = 0
    if (region, "F") not in code.interfaces:
        return found
    for output, specs in zip(
        code.interfaces[region, "F"].outputs, code.code[region, "F"].outputs, strict=True
    ):
        for change in output.changes:
            nbytes = sum(spec.nbytes for spec in specs)
            if isinstance(change.before, Partial):
                found += nbytes if isinstance(change.after, Replicated) else Fraction(nbytes, 2)
            elif isinstance(change.before, Sharded):
                found += Fraction(nbytes * degree, 2)
    return found
