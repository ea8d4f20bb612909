"""Trainings over processes in which attention keys are passed around a ring."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper import Place, Replicate, schedules
from tests.distributed.processes import launch_trainings
from tests.ring import around, fit, long, sequences
from tests.tensors import far

ROUNDING = 1e-13  # 2e-15 measured, after six steps
PAIRS = [[0, 1], [2, 3]]
JOBS: dict[str, tuple[list[Any], bool]] = {  # the program, and whether the batch is divided
    "four": (around(4), False),
    "runs": (around(4, runs=2), False),
    "1f1b": (
        [*schedules.one_f_one_b(stages=2, microbatches=4, devices=PAIRS), sequences(PAIRS, runs=2)],
        False,
    ),
    "zero1": (
        [
            Place(filter={}, devices=PAIRS, axes=["data", "cp"]),
            sequences(None),
            Replicate(filter={}, devices=[0, 1, 2, 3], shard_optimizer=True),
        ],
        True,
    ),
    "zero3": (
        [
            Place(filter={}, devices=PAIRS, axes=["data", "cp"]),
            sequences(None, runs=4),
            Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True),
        ],
        True,
    ),
}


def train(rank: int, name: str) -> dict[str, Any]:
    module, (program, divides) = long(), JOBS[name]
    replica = rank // 2 if divides else None
    fit(module, piper.PiperStrategy(program), 4, replica, max_epochs=2, use_distributed_sampler=False)
    return module.state_dict()


@pytest.mark.parametrize(
    "name",
    ["zero3", *(pytest.param(name, marks=pytest.mark.long) for name in ("runs", "four", "1f1b", "zero1"))],
)
def test_processes_train_as_one_device(name, tmp_path):
    module, fewer = long(), long()
    fit(module, "auto", max_epochs=2)
    fit(fewer, "auto", max_epochs=1)
    for outcome in launch_trainings(4, train, tmp_path, name, limit=timedelta(seconds=800)):
        trained = long()
        trained.load_state_dict(outcome)
        assert far(trained, module) < ROUNDING < 1e-3 < far(trained, fewer)


def test_one_process_trains_alike():
    module, alone = long(dropout=0.2), long()
    fit(module, piper.PiperStrategy(around(4, runs=2), transport="local"), max_epochs=1)
    fit(alone, "auto", max_epochs=1)
    assert far(module, alone) > 1e-3, "the control: without dropout it is another training"
    plain = long()
    fit(plain, piper.PiperStrategy(around(4, runs=2), transport="local"), max_epochs=1)
    assert far(plain, alone) < ROUNDING
