"""Trainings over processes in which forward passes run a second time."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper import Place, Recompute, Replicate, schedules
from tests.distributed.processes import launch_trainings
from tests.ring import fit, long
from tests.tensors import far

ROUNDING = 1e-14  # 2e-16 measured
ZERO3 = [Place(filter={}, devices=[0, 1]), Replicate(filter={}, devices=[0, 1], shard_params=True)]
JOBS: dict[str, tuple[list[Any], bool]] = {  # the program, and whether each process reads batches of its own
    "zero3": ([*ZERO3, Recompute(filter={})], True),
    "zero3, a part": ([*ZERO3[:1], Recompute(filter={}, keep=0.3), *ZERO3[1:]], True),
    "stages": ([*schedules.zero_bubble(stages=2, microbatches=4), Recompute(filter={"PP": 0})], False),
}


def train(rank: int, name: str) -> dict[str, Any]:
    module, (program, draws) = long(dropout=0.0), JOBS[name]
    fit(
        module,
        piper.PiperStrategy(program),
        2,
        rank if draws else None,
        max_epochs=2,
        use_distributed_sampler=False,
    )
    return module.state_dict()


@pytest.mark.parametrize(
    "name", [name if name != "zero3" else pytest.param(name, marks=pytest.mark.long) for name in JOBS]
)
def test_processes_train_as_one_device(name, tmp_path):
    module, fewer = long(), long()
    fit(module, "auto", max_epochs=2)
    fit(fewer, "auto", max_epochs=1)
    for outcome in launch_trainings(2, train, tmp_path, name):
        trained = long()
        trained.load_state_dict(outcome)
        assert far(trained, module) < ROUNDING < 1e-3 < far(trained, fewer)
