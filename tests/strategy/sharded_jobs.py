"""The trainings of `sharded`. Each runs once for all tests, one after another in launches of two and four
processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import launch
from tests.groups import on_demand
from tests.strategy import sharded
from tests.strategy.sharded import PROCESSES, PROGRAMS, Job, fit, train

CLIPPED = {"gradient_clip_val": 0.05}
TEN = {"max_steps": 10, "max_epochs": -1}
ACCUMULATED = {"accumulate_grad_batches": 2, "max_steps": -1, "max_epochs": 1, **CLIPPED}
# Measured: 2.8e-6 for five steps in float32, of the largest element of a tensor.
ROUNDING = 1e-5

PLAIN = [
    Job(program, program)
    for program in PROGRAMS
    if "float32" not in program
    and "bfloat16" not in program
    and "by parameter" not in program
    and not program.startswith(("dp2x2", "dp4"))
]
NORMS = [Job(f"{program}, clipped", program, options=CLIPPED, change=sharded.with_sgd)
         for program in ("dp2 zero3", "pp2 dp2 zero3, zero1")]  # fmt: skip
OTHERS = [
    Job(
        "by value",
        "dp2 zero3",
        options={**CLIPPED, "gradient_clip_algorithm": "value"},
        change=sharded.with_sgd,
    ),
    Job("adagrad", "dp2 zero2", change=sharded.with_adagrad),
    Job("fused", "dp2 zero3", change=sharded.with_fused),
    Job("reload", "pp2 dp2 zero3, zero1", reload=True),
    Job("lamb, by parameter", "dp2 zero3 by parameter", change=sharded.with_lamb),
    Job("hook, by parameter", "dp2 zero3 by parameter", change=sharded.with_hook_and_sgd),
    Job(
        "muon, by parameter",
        "dp2 zero1 by parameter",
        options={"precision": "64-true"},
        change=sharded.with_muon,
    ),
    Job("other sizes", "dp2 zero3", samples=28, options={"max_steps": -1, "max_epochs": 1}),
]
# The last batch is smaller, so that gradients of two sizes are accumulated.
SUMS = [Job(f"{program}, accumulated", program, samples=28, options=ACCUMULATED, change=sharded.with_sgd)
        for program in ("dp2 zero0", "dp2 zero1", "dp2 zero3", "pp2 dp2 zero3, zero1")]  # fmt: skip
SCALED = [
    Job(f"{program}, scaled", program, scaled=True, save=True)
    for program in ("dp2 zero2", "pp2 dp2 zero3, zero1")
]
ALONE = Job("alone", "dp2 zero2", scaled=True, alone=True)
BRAINS = [Job(f"{program}, bf16", program, options={"precision": "bf16-true"})
          for program in ("dp2 zero2", "dp2 zero0 in float32", "dp2 zero2 in float32")]  # fmt: skip
ON_ONE = Job("one", "dp2 zero0", options=TEN, save=True)
ROUNDED = [
    Job(program, program, options=TEN, save=True) for program in PROGRAMS if "gathers in bfloat16" in program
]
BY_PARAMETER = [
    Job("by elements", "dp2 zero3", change=sharded.with_sgd),
    Job("by parameter", "dp2 zero3 by parameter", change=sharded.with_sgd),
]
FACTORED = {
    "saved": Job(
        "adafactor saved", "dp2 zero3 by parameter", options=TEN, save=True, change=sharded.with_adafactor
    ),
    "resumed": Job(
        "adafactor resumed",
        "dp2 zero1 by parameter",
        options=TEN,
        change=sharded.with_adafactor,
        resume="adafactor saved, process, step=5.ckpt",
    ),
}
SAVED = [
    Job("saved", "dp2 zero3", options=TEN, save=True),
    Job("saved by four", "pp2 dp2 zero3, zero1", options=TEN, save=True),
]
RESUMED = [
    Job("zero3 from one", "dp2 zero3", options=TEN, resume="one, None, step=5.ckpt"),
    Job("zero0 from zero3", "dp2 zero0", options=TEN, resume="saved, process, step=5.ckpt"),
    Job("zero1 from zero3", "dp2 zero1", options=TEN, resume="saved, process, step=5.ckpt"),
    Job("pp2 from one", "pp2 dp2 zero3, zero1", options=TEN, resume="one, None, step=5.ckpt"),
]
REFUSED = {
    "lamb": (
        Job("lamb", "dp2 zero1", change=sharded.with_lamb),
        "Lamb does not update each element of a parameter independently",
    ),
    "adafactor": (
        Job("adafactor", "dp2 zero3", change=sharded.with_adafactor),
        "directive 2 (replicate) leaves every process",
    ),
    "lbfgs": (Job("lbfgs", "dp2 zero2", change=sharded.with_lbfgs), "LBFGS"),
    "together": (
        Job("together", "dp2 zero3 by parameter", change=sharded.with_clipping),
        "Clipping updates a parameter differently if it has other parameters as well",
    ),
    "hook": (Job("hook", "dp2 zero2", change=sharded.with_hook), "'inner.weight' has a gradient hook"),
    "fused and scaled": (
        Job("fused and scaled", "dp2 zero0", change=sharded.with_fused, scaled=True),
        "Remove fused=True",
    ),
    "lamb whole": (Job("lamb whole", "dp2 zero0", change=sharded.with_lamb), ""),
}
JOBS = [*PLAIN, *NORMS, *OTHERS, *SUMS, *SCALED, ALONE, *BRAINS, *ROUNDED, *BY_PARAMETER, *FACTORED.values(), *SAVED,
    *RESUMED,
        *(job for job, _ in REFUSED.values())]  # fmt: skip
# In `make test`: what tests of their own read, and of each list some.
QUICK = [*PLAIN, NORMS[1],
    *(job for job in OTHERS if job.name in ("by value", "fused", "muon, by parameter", "other sizes")),
         *SUMS[2:], SCALED[0], ALONE, BRAINS[2], ROUNDED[1], SAVED[0], *RESUMED[1:3],
         *(REFUSED[what][0] for what in ("adafactor", "hook"))]  # fmt: skip


def trace_all(jobs: Sequence[Job], folder: Path) -> None:
    """What the ranks trace, before they are forked: of each precision, and of a smaller last batch."""
    for like in (ON_ONE, SUMS[0], SCALED[0], BRAINS[0]):
        fit(dataclasses.replace(like, program=jobs[0].program, save=False), folder, "local")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all trainings write and read checkpoints."""
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="session")
def sharded_ranks(folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank has seen of a job, by the name of the job."""
    with torch.random.fork_rng():
        fit(ON_ONE, folder, None)

    def run(names: list[str]) -> dict[str, list[dict[str, Any]]]:
        jobs = [job for job in JOBS if job.name in names]
        by_rank = launch(
            PROCESSES[jobs[0].program],
            train,
            folder / f"ranks of {names[0]}",
            jobs,
            folder,
            prepare=trace_all,
        )
        for result in by_rank:
            assert isinstance(result, list), result
        return {job.name: [result[i] for result in by_rank] for i, job in enumerate(jobs)}

    groups = [(size, quick) for quick in (True, False) for size in (2, 4)]
    return on_demand(
        [[job.name for job in JOBS if (PROCESSES[job.program], job in QUICK) == group] for group in groups],
        run,
    )
