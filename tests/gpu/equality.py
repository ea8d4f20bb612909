"""Compares all programs of `benchmarks/accelerator.py` on a device with the same programs on the CPU. All
logical devices are in this process, on streams of their own.

    python -m tests.gpu.equality [--device cuda] [--only "ZeRO"] [--graphs]

On a GPU, each program runs in order first: each instruction is done before the next one is issued. Runs in
which random instructions are late must give the same bits. The values must equal the CPU's within `BOUND`.
With `--device cpu`, the late runs are on the simulated accelerator. The gradients of all schedules with the
same microbatches must have the same bits. With `--graphs`, steps whose passes are CUDA graphs must have the same
bits as steps without graphs. Prints a JSON object for each comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from benchmarks.accelerator import CHAIN, PROGRAMS, steps
from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.errors import PiperError
from lightning_piper.ops.base import Bound
from lightning_piper.runtime import (
    Executor,
    LocalTransport,
    StepResult,
    local_shards_of,
    run_local,
    shards_of,
)
from lightning_piper.runtime.chunk_graphs import ChunkGraphs
from lightning_piper.runtime.executor import Observer
from lightning_piper.schedules import (
    dualpipev,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h2,
    zbv,
    zero_bubble,
)
from lightning_piper.testing.simulated import RATE, Batch, Values, differences
from tests.gpu.steps import slowed

CPU = torch.device("cpu")
BOUND = 1e-9  # largest difference from the CPU, relative to the largest value of a tensor; all are float64
FLOAT32_BOUND = 1e-5  # the bound of programs that sum gradients in float32
LATE = {"cuda": 5, "cpu": 2}  # kind of device -> runs with late instructions
DRAWN = {"dropout"}  # programs whose random numbers differ between a CPU and a GPU
# Schedules of four stages and four microbatches.
SCHEDULES = {
    "GPipe": gpipe(4, 4),
    "1F1B": one_f_one_b(4, 4),
    "interleaved 1F1B": interleaved_one_f_one_b(4, 4, 2),
    "zero bubble": zero_bubble(4, 4),
    "zero bubble, H2": zb_h2(4, 4),
    "ZBV": zbv(4, 4),
    "DualPipeV": dualpipev(4, 4),
}
# Runs the steps of a program: returns the values of each logical device.
Steps = Callable[[Sequence[Batch], Values], list[Values]]


def outcomes(
    batches: Sequence[Batch],
    tensors: Values,
    device: torch.device,
    observer: Observer | None = None,
    cuda_graphs: bool = False,
    graphs: list[ChunkGraphs] | None = None,
) -> list[Values]:
    """The values of each logical device after the steps of these batches: its tensors, its shards, and the
    gradients and metrics of each step, in host memory.

    Args:
        batches: The batches. Batches with the same plans share executors.
        tensors: Parameters and buffers. Each logical device gets a copy.
        device: The device on which all plans run.
        observer: The observer of all executors.
        cuda_graphs: Whether passes become graphs after the first step.
        graphs: Gets the graphs of all executors.
    """
    plans = batches[0].plans
    own = {d: {name: x.to(device, copy=True) for name, x in tensors.items()} for d in sorted(plans)}
    shards = {d: shards_of(plans[d], own[d], device) for d in own}
    kept: dict[int, dict[object, object]] = {d: {} for d in own}
    executors: dict[int, list[Executor]] = {}
    found: list[dict[str, torch.Tensor]] = [{} for _ in own]
    for i, batch in enumerate(batches):
        if id(batch.plans) not in executors:
            transport = LocalTransport(batch.plans)
            executors[id(batch.plans)] = [
                Executor(
                    batch.plans[d],
                    batch.dag.step,
                    own[d],
                    own[d],
                    transport,
                    device,
                    shards[d],
                    kept[d],  # type: ignore[arg-type]
                    cuda_graphs=cuda_graphs,
                )
                for d in own
            ]
            for executor in executors[id(batch.plans)]:
                executor.observer = observer
                if graphs is not None and executor.graphs is not None:
                    graphs.append(executor.graphs)
        results = run_local(executors[id(batch.plans)], batch.leaves, i, last=batch.last)
        for at, (d, result) in enumerate(zip(own, results, strict=True)):
            found[at] |= _named(result, i)
            if batch.last:
                _update(own[d] | local_shards_of(batch.plans[d], shards[d]), result)
    return [
        {name: x.detach().cpu().clone() for name, x in {**values, **own[d]}.items()}
        for d, values in zip(own, found, strict=True)
    ]


def _named(result: StepResult, i: int) -> dict[str, torch.Tensor]:
    made = {"metrics": result.metrics, **result.grads, **result.results}
    return {f"{name} of step {i}": x.clone() for name, x in made.items()}


def _update(held: Mapping[str, torch.Tensor], result: StepResult) -> None:
    """Update the parameters as an optimizer does, on the caller's stream."""
    for name, grad in result.grads.items():
        held[name].sub_(grad.view(held[name].shape).to(held[name].dtype), alpha=RATE)


def in_order(code: Sequence[Bound], source: Sequence[int]) -> list[Bound]:
    """An observer under which each instruction is done before the next one is issued."""

    def done(bound: Bound) -> Bound:
        def call() -> object:
            made = bound()
            torch.accelerator.synchronize()
            return made

        return call

    return [done(bound) for bound in code]


def distance(expected: Sequence[Values], found: Sequence[Values]) -> float:
    """The largest difference of a value, relative to the largest absolute value of its tensor. Infinite if a
    value is NaN on one side only."""
    most = 0.0
    for one, other in zip(expected, found, strict=True):
        for name in one:
            a, b = one[name].double(), other[name].double()
            if not a.numel() or torch.equal(a, b):
                continue
            if not torch.equal(a.isnan(), b.isnan()):
                return float("inf")
            scale = a.nan_to_num().abs().max().clamp(min=1e-30)
            most = max(most, float(((a - b).nan_to_num().abs().max()) / scale))
    return most


def late_runs(device: torch.device, wait: Callable[[int], None] | None) -> list[Steps]:
    """The runs with late instructions. `wait` occupies the current stream for a number of cycles. Without it,
    the runs are on the simulated accelerator, in random orders."""

    def simulated(order: int) -> Steps:
        def run(batches: Sequence[Batch], tensors: Values) -> list[Values]:
            with Simulated(order):
                return outcomes(batches, tensors, CPU)

        return run

    def slow(seed: int, wait: Callable[[int], None]) -> Steps:
        return lambda batches, tensors: outcomes(batches, tensors, device, slowed(seed, wait))

    return [simulated(i) if wait is None else slow(i, wait) for i in range(LATE[device.type])]


def compared(name: str, device: torch.device, late: Sequence[Steps]) -> dict[str, object]:
    """The row of a program: the number of late runs, and the largest difference from the CPU."""
    start = time.perf_counter()
    own = PROGRAMS[name](CPU)
    here = own if device.type == "cpu" else PROGRAMS[name](device)
    first = outcomes(*here, device, None if device.type == "cpu" else in_order)
    said: list[str] = []
    for i, run in enumerate(late):
        try:
            said += [f"late run {i}: {each}" for each in differences(first, run(*here))]
        except PiperError as error:
            said.append(f"late run {i}: {error}")
    row: dict[str, object] = {"name": name, "late runs": len(late), "runs with other bits": 0}
    row["runs with other bits"] = len({each.partition(":")[0] for each in said})
    if name not in DRAWN:
        row["difference from the CPU"] = far = distance(outcomes(*own, CPU), first)
        bound = FLOAT32_BOUND if "float32" in name else BOUND
        said += [f"differs from the CPU by {far:.1e}, more than {bound:.0e}"] if not far <= bound else []
    outcome = {"outcome": "failed", "said": said[0].splitlines()[0]} if said else {}
    return {**row, **outcome, "seconds": time.perf_counter() - start}


def with_graphs(name: str, device: torch.device) -> dict[str, object]:
    """The row of a program whose passes are graphs: the share of passes that are, and whether four steps have the bits of
    steps without graphs."""
    start = time.perf_counter()
    batches, tensors = PROGRAMS[name](device)
    batches, graphs, found = [*batches, *batches], list[ChunkGraphs](), list[list[Values]]()
    for on in (False, True):
        with Simulated(0) if device.type == "cpu" else contextlib.nullcontext():
            found.append(outcomes(batches, tensors, device, cuda_graphs=on, graphs=graphs))
    captured, refused = sum(x.captured for x in graphs), sum(x.refused.total() for x in graphs)
    said = differences(*found)
    row = {"name": f"{name}, graphs", "graphs, share of passes": captured / (captured + refused)}
    outcome = {"outcome": "failed", "said": f"other bits: {', '.join(said[:3])}"} if said else {}
    return {**row, "values with other bits": len(said), **outcome, "seconds": time.perf_counter() - start}


def gradients_of(found: Sequence[Values]) -> Values:
    """The gradients of each step, from the logical device that has them."""
    return {
        name: x
        for values in found
        for name, x in values.items()
        if " of step " in name and not name.startswith("metrics")
    }


def across_schedules(device: torch.device) -> dict[str, object]:
    """The row of the comparison of schedules: how many have other bits than the first one."""
    start = time.perf_counter()
    found = {
        name: gradients_of(outcomes(*steps(CHAIN, 8, program, device=device), device))
        for name, program in SCHEDULES.items()
    }
    first = next(iter(found.values()))
    others = [name for name, values in found.items() if differences([first], [values])]
    row = {"name": f"{len(found)} schedules", "runs with other bits": len(others)}
    said = {"outcome": "failed", "said": f"{', '.join(others)} differ from GPipe"} if others else {}
    return {**row, **said, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="a pattern of names of programs")
    parser.add_argument("--graphs", action="store_true", help="compare passes that are CUDA graphs")
    options = parser.parse_args()
    device = torch.device(options.device, None if options.device == "cpu" else 0)
    if device.type == "cuda":
        # Bits can only be compared if each kernel sums in the same order in every run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    late = late_runs(device, torch.cuda._sleep if device.type == "cuda" else None)
    rows = {"schedules": lambda: across_schedules(device)}
    rows |= {name: partial(compared, name, device, late) for name in PROGRAMS}
    if options.graphs:
        rows = {name: partial(with_graphs, name, device) for name in PROGRAMS}
    for name, compare in rows.items():
        if not re.search(options.only, name):
            continue
        try:
            row = compare()
        except Exception as error:  # the other programs still run
            said = (str(error) or type(error).__name__).splitlines()[0]
            row = {"name": name, "outcome": "failed", "said": f"{type(error).__name__}: {said}"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
