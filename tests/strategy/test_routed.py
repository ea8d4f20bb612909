"""Divided experts on four processes: the results are those of one device, each process holds a part of the
memory, and checkpoints can be loaded with any other division.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_piper.testing import Model
from tests.distributed.processes import launch
from tests.groups import marked, on_demand
from tests.strategy.fitting import distance
from tests.strategy.routed import PROGRAMS, SPECS, Job, checkpoint, fit, trace_all, train

Ranks = Callable[[str], list[dict[str, Any]]]
# 1.6e-16 was measured for five AdamW steps in float64, relative to the largest element of a tensor.
ROUNDING = 1e-14
CLIPPED = {"gradient_clip_val": 0.05}
ACCUMULATED = {"accumulate_grad_batches": 2, "max_steps": 3}

PLAIN = [Job(f"{program}, rows", program) for program in PROGRAMS]
PLAIN += [Job(f"{program}, places", program, "places") for program in ("pp2 ep2 zero3", "ep2 dp2")]
OTHERS = [
    Job("clipped", "ep2 dp2", options=CLIPPED),
    Job("clipped stages", "pp2 ep2 zero2", options=CLIPPED),
    Job("accumulated", "pp2 ep2 zero3", options=ACCUMULATED),
    Job("accumulated twice owned", "ep2 dp2", options={**ACCUMULATED, **CLIPPED}),
]
SAVED = [Job("whole", "pp2 ep2 zero3", save="consolidated"), Job("pieces", "ep2 dp2 zero3", save="sharded")]
RESUMED = [
    Job("whole to ep4", "ep4", resume="whole"),
    Job("pieces to stages", "pp2 ep2 zero3", resume="pieces"),
    Job("pieces to ep4", "ep4", resume="pieces"),
    Job("one to twice", "ep2 dp2", resume="one"),
]
JOBS = [*PLAIN, *OTHERS, *SAVED, *RESUMED]
QUICK = [PLAIN[0], PLAIN[3], *OTHERS[2:], SAVED[0], RESUMED[0], RESUMED[3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routed")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """What each rank has seen of a job."""
    with torch.random.fork_rng():
        fit(Job("one", None, save="consolidated"), folder)

    def run(names: list[str]) -> dict[str, list[dict[str, Any]]]:
        jobs = [job for job in JOBS if job.name in names]
        by_rank = launch(4, train, folder / names[0], jobs, folder, prepare=trace_all)
        for result in by_rank:
            assert isinstance(result, list), result
        return {job.name: [result[i] for result in by_rank] for i, job in enumerate(jobs)}

    quick = [job.name for job in QUICK]
    return on_demand([quick, [job.name for job in JOBS if job.name not in quick]], run)


@pytest.fixture(scope="module")
def one(folder: Path) -> Any:
    """What the same training gives on one device."""
    known: dict[Any, dict[str, Any]] = {}

    def train_on_one(job: Job) -> dict[str, Any]:
        key = (job.model, repr(job.options))
        if key not in known:
            with torch.random.fork_rng():
                known[key] = fit(Job("alone", None, job.model, job.options), folder)
        return known[key]

    return train_on_one


@pytest.mark.parametrize("job", marked([*PLAIN, *OTHERS, *SAVED], QUICK), ids=lambda job: job.name)
def test_trains_as_one_device(job: Job, ranks: Ranks, one: Any) -> None:
    expected = one(job)
    start = Model(SPECS[job.model]).state_dict()
    for seen in ranks(job.name):
        assert "error" not in seen, seen
        assert distance(expected["values"], seen["values"]) <= ROUNDING
        torch.testing.assert_close(seen["losses"], expected["losses"], rtol=ROUNDING, atol=0)
        moved = distance(expected["values"], dict(start))
        assert moved > 1e-3, "the training changes nothing"


@pytest.mark.parametrize("program", marked(PROGRAMS, [job.program for job in QUICK[:2]]))
def test_each_device_has_its_part_of_the_experts(program: str, ranks: Ranks) -> None:
    """Parameters, gradients and optimizer state: 1/EP of those of the stage. Where several own the same, they
    have it together once: it is less than an aligned shard here, which need not be even.
    """
    total = sum(
        x.numel() for name, x in Model(SPECS["rows"]).named_parameters() if name.endswith((".up", ".down"))
    )
    replicas, degree, _ = PROGRAMS[program]
    held = [seen["held"] for seen in ranks(f"{program}, rows")]
    stages, shard_group = 4 // replicas, replicas // degree
    assert {key: sum(h[key] for h in held) for key in held[0]} == {
        "params": total,
        "grads": total,
        "state": 2 * total,
    }
    part = total // stages // degree
    assert max(h["params"] for h in held) <= part
    if shard_group == 1:
        assert held == [{"params": part, "grads": part, "state": 2 * part}] * 4


@pytest.mark.parametrize("job", marked(RESUMED, QUICK), ids=lambda job: job.name)
def test_resumes_with_another_division(job: Job, ranks: Ranks, one: Any) -> None:
    """After three steps somewhere else, the last two: the end is that of five steps on one device."""
    expected = one(job)
    for seen in ranks(job.name):
        assert "error" not in seen, seen
        assert len(seen["losses"]) == 2
        assert distance(expected["values"], seen["values"]) <= ROUNDING


def test_a_checkpoint_is_that_of_one_device(folder: Path, ranks: Ranks) -> None:
    ranks("whole")
    mine = torch.load(checkpoint(folder, "whole"), weights_only=True)
    alone = torch.load(checkpoint(folder, "one"), weights_only=True)
    assert mine["state_dict"].keys() == alone["state_dict"].keys()
    assert distance(alone["state_dict"], mine["state_dict"]) <= ROUNDING
    for i, state in alone["optimizer_states"][0]["state"].items():
        assert mine["optimizer_states"][0]["state"][i]["exp_avg"].shape == state["exp_avg"].shape
