"""The training steps of a module without a Trainer: which program is compiled for which batch and which
Python state, and what it computes.
"""

from __future__ import annotations

import contextlib
import copy

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import flatten
from lightning_piper.directives import parse
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import Known
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World
from lightning_piper.session.process_runtime import (
    Prepared,
    ProcessRuntime,
    Settings,
    _check_number,
    check_devices,
    check_placed,
)
from lightning_piper.session.programs import MANY_KEPT, TRAINING, KeptCaptures, Programs

ALONE = World(0, 1, torch.device("cpu"))


class Net(L.LightningModule):
    """Two stages, of which the second depends on Python state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 6), nn.Linear(6, 1), "square"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = torch.tanh(self.first(batch))
        with piper.annotate("PP", 1):
            out = self.second(hidden)
            return out.square().mean() if self.kind == "square" else out.abs().mean()


class Session:
    """A net, and the objects that run its training step over two devices in this process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net().double()
        program = list(piper.schedules.one_f_one_b(stages=2, microbatches=2))
        settings = Settings(
            program, 1, True, contextlib.nullcontext, contextlib.nullcontext, local=True, timeout=None
        )
        self.settings, self.runtime = settings, ProcessRuntime(settings, ALONE)
        self.programs = Programs(self.net, self.runtime, settings, ALONE)
        _, batch_spec = flatten(self.batch(8))
        self.first = self.programs.compile(TRAINING, batch_spec, None)
        self.own = Ownership(self.net, self.first, ALONE)
        self.own.distribute(0, Known())
        self.runtime.bind(self.first, self.own)
        self.programs.prepare(TRAINING, batch_spec, self.first)

    def batch(self, size: int) -> Tensor:
        return torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(size))

    def prepared(self, size: int) -> tuple[Prepared, bool]:
        """What runs a batch of this size, and whether it existed before this call."""
        _, batch_spec = flatten(self.batch(size))
        captured = self.programs.find(TRAINING, batch_spec, 0)
        found = self.programs.prepared(TRAINING, batch_spec)
        if found is not None:
            return found, True
        return self.programs.prepare(
            TRAINING, batch_spec, self.programs.compile(TRAINING, batch_spec, captured)
        ), False

    def gradients(self, size: int) -> dict[str, Tensor]:
        prepared, _ = self.prepared(size)
        leaves, _ = flatten(self.batch(size))
        return dict(self.runtime.run(prepared, prepared.compiled.step.inputs(leaves), seed=0).grads)

    def expected(self, size: int) -> dict[str, Tensor]:
        loss = self.net.training_step(self.batch(size), 0)
        return dict(
            zip(
                dict(self.net.named_parameters()),
                torch.autograd.grad(loss, list(self.net.parameters())),
                strict=True,
            )
        )


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-12, atol=1e-15) for name in a
    )


def test_any_number_of_samples_comes_from_one_capture(session):
    for size in (8, 6, 8):
        assert close(session.gradients(size), session.expected(size))
    assert not close(session.gradients(8), session.expected(6))
    (first, known), (smaller, too) = session.prepared(8), session.prepared(6)
    assert known and too and first is session.prepared(8)[0]
    assert smaller.compiled is not first.compiled and smaller.compiled.step is first.compiled.step
    assert session.programs.compiled == [session.first]


def test_python_state_has_a_capture_of_its_own(session):
    before = session.prepared(8)[0]
    session.net.kind = "absolute"
    try:
        expected = session.expected(8)
        other, known = session.prepared(8)
        assert not known and other.compiled.step is not before.compiled.step
        assert close(session.gradients(8), expected)
    finally:
        session.net.kind = "square"
    assert session.prepared(8) == (before, True) and not close(session.gradients(8), expected)


def test_processes_that_do_not_fit_the_program(session):
    with pytest.raises(PiperError, match=r"on 2 logical devices, but the Trainer has 1 process"):
        check_devices(session.first, ALONE, session.settings)


def test_the_number_of_processes_is_checked_before_a_capture() -> None:
    program = parse(piper.schedules.one_f_one_b(2, 4))
    with pytest.raises(PiperError, match=r"but the Trainer has 4 processes. Give the Trainer 2 processes"):
        check_placed(program, 4)
    words = r"each local replica of the Trainer has 1 process. Give 3 local replicas 6 processes"
    with pytest.raises(PiperError, match=words):
        _check_number(2, 1, local_replicas=3)
    check_placed(program, 2)
    check_placed(program, 1)  # an uncaptured step runs on one device
    check_placed(parse([piper.Place(devices=[0, 2])]), 2)  # gaps have their own error


def test_a_process_keeps_its_latest_captures(session):
    kept, step = KeptCaptures(), session.first.step
    kept.add(step)
    kept.add(step)  # it was used again
    others = [copy.copy(step) for _ in range(MANY_KEPT - 1)]
    for other in others:
        other.context = "another context"  # type: ignore[assignment]
        kept.add(other)
    assert kept.find(step.batch_spec, step.context) is step
    kept.add(copy.copy(others[0]))
    assert kept.find(step.batch_spec, step.context) is None and len(kept._steps) == MANY_KEPT
