"""Two groups of two replicas, each with all shards (HSDP), under Lightning's Trainer on four processes: in
float64, the results are those of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import launch
from tests.strategy import sharded
from tests.strategy.fitting import distance
from tests.strategy.sharded import Job, fit, train

EXACT = {"precision": "64-true"}
TEN = {**EXACT, "max_steps": 10, "max_epochs": -1}
CLIPPED = {**EXACT, "gradient_clip_val": 0.05}
ACCUMULATED = {**CLIPPED, "accumulate_grad_batches": 2, "max_steps": -1, "max_epochs": 1}
ROUNDING = 1e-13  # measured: 2e-15 for ten steps, of the largest element of a tensor

ONE = Job("one", "dp4 zero3", options=TEN, save=True)
SAVED = "groups saved, process, step=5.ckpt"
PLAIN = [Job(program, program, options=EXACT) for program in ("dp2x2 zero1", "dp2x2 zero2", "dp2x2 zero3")]
# The last batch is smaller, so that gradients of two sizes are accumulated.
CHANGED = [
    Job("clipped", "dp2x2 zero3", options=CLIPPED, change=sharded.with_sgd),
    *(Job(f"{program}, accumulated", program, samples=28, options=ACCUMULATED, change=sharded.with_sgd)
      for program in ("dp2x2 zero1", "dp2x2 zero3")),
    Job("muon", "dp2x2 zero1 by parameter", options=EXACT, change=sharded.with_muon),
]  # fmt: skip
CHAIN = [
    Job("groups saved", "dp2x2 zero3", options=TEN, save=True),
    Job("groups to dp4", "dp4 zero3", options=TEN, resume=SAVED),
    Job("groups to pp2 dp2", "pp2 dp2 zero3, zero1", options=TEN, resume=SAVED),
    Job("dp4 saved", "dp4 zero3", options=TEN, save=True),
    Job("dp4 to groups", "dp2x2 zero2", options=TEN, resume="dp4 saved, process, step=5.ckpt"),
    Job("pp2 dp2 saved", "pp2 dp2 zero3, zero1", options=TEN, save=True),
    Job("pp2 dp2 to groups", "dp2x2 zero3", options=TEN, resume="pp2 dp2 saved, process, step=5.ckpt"),
    Job("one to groups", "dp2x2 zero1", options=TEN, resume="one, None, step=5.ckpt"),
]
JOBS = [*PLAIN, *CHANGED, *CHAIN, Job("dp4", "dp4 zero3", options=EXACT)]


def trace(jobs: Sequence[Job], folder: Path) -> None:
    """What the ranks trace, before they are forked."""
    fit(jobs[0], folder, "local")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def ten(folder: Path) -> dict[str, Any]:
    """Ten steps of one device, which saves a checkpoint after five."""
    return fit(ONE, folder, None)


@pytest.fixture(scope="module")
def resumed(folder: Path, ten: Any) -> dict[str, Any]:
    """The last five of these steps, from the checkpoint. Lightning reads it into a module in float32."""
    return fit(dataclasses.replace(ONE, save=False, resume="one, None, step=5.ckpt"), folder, None)


@pytest.fixture(scope="module")
def ranks(folder: Path, ten: Any) -> dict[str, list[dict[str, Any]]]:
    """What every rank has seen of a job, by the name of the job."""
    found = launch(4, train, folder / "ranks", JOBS, folder, prepare=trace)
    for each in found:
        assert isinstance(each, list), each
    return {job.name: [each[i] for each in found] for i, job in enumerate(JOBS)}


@pytest.mark.long
@pytest.mark.parametrize("job", [*PLAIN, *CHANGED], ids=lambda job: job.name)
def test_groups_train_as_one_device(job, ranks, folder):
    one = fit(job, folder, None)
    for rank in ranks[job.name]:
        assert "error" not in rank, rank
        assert distance(one["values"], rank["values"]) < ROUNDING


@pytest.mark.long
def test_another_training_would_show(ranks, folder):
    other = fit(dataclasses.replace(PLAIN[0], samples=32), folder, None)
    assert distance(other["values"], ranks[PLAIN[0].name][0]["values"]) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("job", CHAIN, ids=lambda job: job.name)
def test_checkpoints_go_from_groups_to_other_programs_and_back(job, ranks, ten, resumed):
    expected = resumed if job.resume else ten
    for rank in ranks[job.name]:
        assert "error" not in rank, rank
        assert len(rank["losses"]) == (5 if job.resume else 10)
        assert distance(expected["values"], rank["values"]) < ROUNDING


@pytest.mark.long
def test_the_checkpoint_of_groups_is_that_of_one_device(ranks, ten, folder):
    found, expected = (
        torch.load(folder / file, weights_only=True) for file in (SAVED, "one, None, step=5.ckpt")
    )
    assert distance(expected["state_dict"], found["state_dict"]) < ROUNDING
    (found,), (expected,) = found["optimizer_states"], expected["optimizer_states"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert distance(state, found["state"][number]) < ROUNDING


@pytest.mark.long
def test_a_process_holds_the_shards_of_its_group(ranks):
    """Each group has the same shards, half of everything; four replicas without groups have a quarter."""
    grouped, flat = ([rank["held"] for rank in ranks[name]] for name in ("dp2x2 zero3", "dp4"))
    assert grouped[:2] == grouped[2:]
    assert 1.8 < sum(grouped) / sum(flat) < 2.2


@pytest.mark.long
def test_every_element_is_written_by_one_process(ranks):
    counts: dict[Any, torch.Tensor] = {}
    for rank in ranks["dp2x2 zero3"]:
        for shard in rank["pieces"]:
            numel = torch.Size(shard.shape).numel()
            count = counts.setdefault((shard.name, shard.key), torch.zeros(numel, dtype=torch.int64))
            count[shard.start : shard.stop] += 1
    assert {key for _, key in counts} == {"", "exp_avg", "exp_avg_sq"}
    assert all((count == 1).all() for count in counts.values())
