"""What a round of local SGD costs, computed by hand and counted step by step."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.compiler import Compiled
from lightning_piper.profile import Schedule
from lightning_piper.profile.recording import Recording
from lightning_piper.simulate import Link, simulate


class Net(L.LightningModule):
    """Four layers of 64 x 64 elements, of which the last one is in bfloat16, a frozen one, and a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.layers[3].to(torch.bfloat16)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.frozen(batch) - self.mean * self.count
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().square().mean()


LAYER = 4 * 64 * 64  # bytes in an exchange
BUFFER = 4 * 64


def compiled(program: Any) -> Compiled:
    return piper.compile(Net(), torch.randn(8, 64), program)


def test_computed_by_hand() -> None:
    """Three replicas of one device: each part goes around a ring of three, twice."""
    settings = piper.LocalSGD(replicas=3, every=8, parts=5)
    cost = settings.cost(compiled([]), Fraction(10), Link(Fraction(1), Fraction(64)))
    part = 4 * (1 + Fraction(LAYER, 3) / 64)
    buffer = 4 * (1 + Fraction(BUFFER, 3) / 64)
    # The frozen layer is a part of the parameters, but nothing of it is exchanged.
    assert cost.pauses == (part + buffer, part, part, part, 0)
    assert cost.step_time == 10 + (4 * part + buffer) / 8 and cost.nbytes == 4 * LAYER + BUFFER
    assert cost.bytes_per_step == pytest.approx(2 * 2 / 3 * cost.nbytes / 8)
    assert f"{float(cost.step_time):.6g} a step" in str(cost)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_time_is_that_of_the_updates_one_by_one(parts: int) -> None:
    """And the control: over fewer updates than a round, it is not."""
    settings = piper.LocalSGD(replicas=2, every=8, parts=parts)
    cost = settings.cost(compiled([]), 3, Link(1, 1000))

    def total(updates: int) -> float:
        due = [k for step in range(1, updates + 1) for k in range(parts) if settings.is_due(k, step)]
        return 3 * updates + float(sum(cost.pauses[k] for k in due))

    assert float(cost.step_time) == pytest.approx(total(80) / 80)
    assert float(cost.step_time) != pytest.approx(total(7) / 7)


def test_parts_divide_a_pause() -> None:
    """The sum of pauses stays the same, except for latencies."""
    program, link = compiled([]), Link(0, Fraction(1000))
    whole, four = (
        piper.LocalSGD(replicas=2, every=8, parts=parts).cost(program, 1, link) for parts in (1, 4)
    )
    assert whole.step_time == four.step_time and max(four.pauses) < max(whole.pauses) / 2
    late = piper.LocalSGD(replicas=2, every=8, parts=4).cost(program, 1, Link(1, Fraction(1000)))
    assert late.step_time > four.step_time


def test_a_device_exchanges_its_shards() -> None:
    """Half of the parameters with ZeRO on two devices. With replicas that are whole, all of them."""
    settings = piper.LocalSGD(replicas=2, every=4)
    shards, whole = (settings.cost(compiled(piper.parallel(dp=2, zero=zero)), 1, Link()) for zero in (3, 0))
    assert whole.nbytes == 4 * LAYER + BUFFER
    assert shards.nbytes == 2 * LAYER + BUFFER


def test_the_step_is_that_of_the_simulation() -> None:
    program = compiled(piper.parallel(dp=2))
    step = simulate(program.dag, program.plans).step_time
    cost = piper.LocalSGD(replicas=2, every=4).cost(program, step, Link())
    assert cost.step_time == step and cost.pauses == (0,)
    assert json.loads(json.dumps(cost.to_json()))["bytes_per_step"] == cost.bytes_per_step


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_recording_logs_exchanges(rank: int, tmp_path: Path) -> None:
    """On rank 0 only. The time is that of the exchange."""
    logger = Logger()
    trainer: Any = SimpleNamespace(loggers=[logger], log_dir=str(tmp_path), global_step=7)
    world: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    recording = Recording(Schedule(), trainer, world, None)
    started = time.perf_counter()
    recording.exchange(lambda: 1234)
    most = time.perf_counter() - started
    if rank:
        assert not logger.logged and not [*tmp_path.glob("events*")]
        return
    ((step, values),) = logger.logged
    assert (step, values["piper/exchange_bytes"]) == (7, 1234)
    assert 0 < values["piper/exchange_time"] < most
    assert [*tmp_path.glob("events*")]
