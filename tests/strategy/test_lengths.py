"""Fits on batches of many lengths: equal to plain Lightning, and with replicas equal to the mean over the
tokens of all replicas.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_piper.capture.steps import captured_step
from lightning_piper.errors import ExecutionError
from lightning_piper.session import programs
from tests.distributed.processes import launch_trainings
from tests.lengths import Causal, Counting, Ignoring, tokens
from tests.strategy.fitting import Batches, distance, local, sharing_captures, trainer, values
from tests.strategy.lengths import LENGTHS, by_hand, net, train

SHAPES = [(4, 6), (4, 9), (6, 9), (4, 17), (3, 6), (5, 30), (4, 6)]  # samples and length of each batch


@sharing_captures
def fitted(strategy: Any, shapes: Any = SHAPES, module: Any = None) -> Any:
    module = net() if module is None else module
    fit, record = trainer(strategy, max_steps=-1, max_epochs=1)
    fit.fit(module, Batches(tokens(*shape) for shape in shapes))
    return values(module), torch.stack(record.losses)


@pytest.mark.parametrize("make", [Causal, Ignoring])
def test_one_process_trains_on_all_lengths_as_plain_lightning_does(make: type[Causal]) -> None:
    (found, losses), (plain, expected) = fitted(local(), module=net(make)), fitted("auto", module=net(make))
    assert distance(found, plain) < 1e-12 and torch.allclose(losses, expected, rtol=1e-12)
    others, _ = fitted("auto", [*SHAPES[:-1], (4, 7)], net(make))
    assert distance(others, plain) > 1e-4  # the control


def test_only_what_is_traced_again_and_again_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MANY_SPECS", 3)
    monkeypatch.setattr(captured_step, "MANY_SIZES", 3)
    shapes = [(4, length) for length in range(4, 10)]
    for others in (shapes, [(size, 6) for size in range(4, 10)]):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fitted(local(), others)
    with pytest.warns(UserWarning, match="more than 3 layouts") as seen:
        found, _ = fitted(local(), shapes, net(Counting))
    assert sum("more than 3 layouts" in str(w.message) for w in seen) == 1
    plain, _ = fitted("auto", shapes, net(Counting))
    assert distance(found, plain) < 1e-11


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_replicas_may_have_batches_of_other_lengths(processes: int, tmp_path: Any) -> None:
    ranks = launch_trainings(processes, train, tmp_path, processes)
    for name in LENGTHS:
        expected, losses = by_hand(name)
        for rank in ranks:
            assert distance(rank[name]["values"], expected) < 1e-12, name
            assert torch.allclose(torch.stack(rank[name]["losses"]), torch.stack(losses), rtol=1e-12)
        for wrong in (by_hand(name, [0]), by_hand(name, even=True)):  # the controls
            assert distance(wrong[0], expected) > 1e-4
    words = "the replicas drew batches of different shapes, and their steps run different regions"
    assert all((words if processes == 2 else "PP=2") in rank["refused"] for rank in ranks), ranks[0][
        "refused"
    ]


def test_a_program_for_another_length_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: the length that another process has."""
    own = programs.Programs.prepared

    def prepared(self: Any, step: Any, batch_spec: Any) -> Any:
        return own(self, step, batch_spec) or next(iter(self._prepared.values()), None)

    monkeypatch.setattr(programs.Programs, "prepared", prepared)
    with pytest.raises(
        ExecutionError,
        match=r"tensor 0 of the batch is int64\[4, 9\], but the step was captured with int64\[4,6\]",
    ):
        fitted(local())
