"""Trainings with an operation whose last bits differ from run to run, like a sum whose order is a race."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, Batches, trainer

FAILS_IN = 2  # the batch from which on the bits differ
PROGRAMS: dict[str, Any] = {"stages": list(PROGRAM), "replicas": None, "zero3": "zero3"}
_FAULT = {"pass": "", "batch": 0}
_COUNTS = itertools.count(1)


def _noise(here: str) -> float:
    """A number that rounds to another one in each call; 0 without a fault in this pass and batch."""
    fails = _FAULT["pass"] == here and int(_FAULT["batch"]) >= FAILS_IN
    return 1e-6 * next(_COUNTS) if fails else 0.0


@torch.library.custom_op("piper_tests::flaky", mutates_args=())
def flaky(x: torch.Tensor) -> torch.Tensor:
    return x + _noise("forward")


@torch.library.custom_op("piper_tests::flaky_backward", mutates_args=())
def flaky_backward(grad: torch.Tensor) -> torch.Tensor:
    return grad + _noise("backward")


flaky.register_fake(torch.empty_like)
flaky_backward.register_fake(torch.empty_like)
flaky.register_autograd(lambda context, grad: flaky_backward(grad))


class Net(L.LightningModule):
    """Two stages with dropout and a batch norm. The first one has the operation.

    Args:
        fault: The pass of the operation whose bits differ: "forward", "backward", or "" for none.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.first, self.second, self.drop = nn.Linear(8, 6), nn.Linear(6, 1), nn.Dropout(0.5)
        self.norm: nn.Module = nn.BatchNorm1d(6)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        _FAULT.update({"pass": self.fault, "batch": batch_idx})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with piper.annotate("PP", 0):
            h = flaky(self.drop(self.norm(self.first(x))))
        with piper.annotate("PP", 1):
            loss = F.mse_loss(self.second(h), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Buffered(Net):
    """The operation changes only a buffer."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: torch.Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with piper.annotate("PP", 0):
            h = self.drop(self.norm(self.first(x)))
            with torch.no_grad():
                self.mean.copy_(flaky(h.mean(0)))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)


class Hidden(Net):
    """The operation's result counts for nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with piper.annotate("PP", 0):
            h = self.drop(self.norm(self.first(x)))
            h = h + 0.0 * flaky(h.detach())
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)


STATES: dict[str, Callable[[Any], float]] = {
    "nothing": lambda module: 1.0,
    "random": lambda module: random.random(),
    "numpy": lambda module: float(np.random.rand()),
    "generator": lambda module: float(torch.rand((), generator=module.generator)),
    "numpy generator": lambda module: float(module.numbers.random()),
    "count": lambda module: float(module.count),
    "tensor": lambda module: float(module.total),
}


class Stateful(Net):
    """Changes its state in each step, and reads a part of it.

    Args:
        state: A name of `STATES`; "time" for a number that never comes again, which the step reads, or
            "logged", which it only logs.
    """

    def __init__(self, state: str) -> None:
        super().__init__()
        self.state, self.count, self.outputs, self.total = state, 0, [], torch.zeros(())
        self.generator, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.count += 1
        self.total += 1
        number = STATES.get(self.state, lambda module: 1.0)(self)
        h = self.drop(self.norm(self.first(x)))
        h = h * (time.perf_counter_ns() if self.state == "time" else number)
        loss = F.mse_loss(self.second(h), y)
        self.outputs.append(loss.detach())
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log(
            "noise",
            flaky(loss.detach()) if self.state != "logged" else loss.detach() * time.perf_counter_ns(),
        )
        return loss

    def drawn(self) -> tuple[Any, ...]:
        """Draw a number from each generator."""
        return random.random(), np.random.rand(), torch.rand((), generator=self.generator).item()


def batches(number: int = 4) -> Batches:
    draw = torch.Generator().manual_seed(0)
    return Batches(
        [(torch.randn(8, 8, generator=draw), torch.randn(8, 1, generator=draw)) for _ in range(number)]
    )


def fit(strategy: Any, module: Net, **options: Any) -> tuple[L.Trainer, list[torch.Tensor]]:
    """Train four batches. Return the Trainer and the losses."""
    L.seed_everything(0, verbose=False)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.randn(x.shape))
    found, record = trainer(strategy, max_steps=-1, max_epochs=1, **options)
    found.fit(module, batches())
    return found, record.losses


def train(rank: int, program: str, fault: str) -> str | None:
    """Train over two processes, whose rank 1 alone has the fault. Return the error."""
    module = Net(fault if rank == 1 or program == "stages" else "")
    if program != "stages":
        module.norm = nn.LayerNorm(6)
    try:
        fit(piper.PiperStrategy(PROGRAMS[program], verify="determinism"), module, devices=2)
    except piper.PiperError as error:
        return str(error)
    return None
