"""Rows of `python_state`: counters of the Trainer, learning rates, logged values, and what differs from call
to call.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.strategy.python_state import Net

HERE = r"python_\w+\.py:\d+"


class GlobalStep(Net):
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        return 1 + self.global_step / 4


class CurrentEpoch(Net):
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        return 1 + self.current_epoch * 0.5


class BatchIdx(Net):
    microbatches = 2
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        self.log("batch", batch_idx)
        self.log("twice", 2.0 * batch_idx)
        return (batch_idx + 1) * 0.5


class TensorOfBatchIdx(Net):
    microbatches = 2
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        number = torch.tensor(batch_idx)
        number += 1  # it is the step's own
        return 0.25 * number + torch.tensor([[batch_idx, 0.5], [1.0, self.global_step / 4]]).sum()


class PlaceInATable(Net):
    captures = 3  # torch asks for the number

    def factor(self, batch_idx: int) -> Any:
        return torch.tensor([0.5, 1.5, 2.5])[torch.tensor(batch_idx)]


class ANumberBehindOneLikeThatOfTheSamples(Net):
    """A half may be made of the number of samples."""

    microbatches = 2
    captures = 1

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        kept = (y > 0).double()
        return (
            (F.mse_loss(out, y, reduction="none") * kept).sum()
            / kept.sum()
            * 0.5
            * (1 + math.cos(self.global_step / 10))
        )


class BatchIdxInIf(Net):
    captures = 2

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(out, y)
        if batch_idx % 2 == 0:
            loss = loss + 0.1 * out.square().mean()
        return loss


class LogsNowAndThen(Net):
    captures = 2

    def factor(self, batch_idx: int) -> Any:
        if self.global_step % 2 == 0:
            self.log("now and then", self.global_step * 1.0)
        return 1.0


class LogNamedByEpoch(Net):
    captures = 2

    def factor(self, batch_idx: int) -> Any:
        self.log(f"epoch {self.current_epoch}", 1.0 * batch_idx)
        return 1.0 if self.current_epoch else 0.5


class OfTheTrainer(Net):
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        loop = self.trainer.fit_loop
        return 1 + self.trainer.global_step + self.trainer.current_epoch + loop.epoch_loop.batch_idx / 4


class Progress(Net):
    """How far the training has come."""

    captures = 1

    def factor(self, batch_idx: int) -> Any:
        total = self.trainer.num_training_batches * (self.trainer.max_epochs or 1)
        return 1 + (batch_idx + self.current_epoch * self.trainer.num_training_batches) / total


class IsLastBatch(Net):
    captures = 2

    def factor(self, batch_idx: int) -> Any:
        return 2.0 if self.trainer.is_last_batch else 1.0


class Metrics(Net):
    """What was logged in the step before."""

    captures = 2

    def factor(self, batch_idx: int) -> Any:
        metrics = self.trainer.callback_metrics
        return 1 + metrics["seen"] if "seen" in metrics else 1.0

    def change(self, step: int) -> None:
        self.log("seen", step / 4)


class Cosine(Net):
    """Annealing."""

    captures = 1

    def factor(self, batch_idx: int) -> Any:
        return 0.5 * (1 - math.cos(math.pi * (self.global_step + 1) / 6)) + math.exp(-self.global_step)


class Minimum(Net):
    captures = 6

    def factor(self, batch_idx: int) -> Any:
        return min(1, (self.global_step + 1) / 4) * max(0.1, 1 - self.current_epoch / 3)


class Rounded(Net):
    captures = 3

    def factor(self, batch_idx: int) -> Any:
        return 1 + round(self.global_step / 4) + int(self.global_step / 2)


class InComprehensions(Net):
    captures = 6

    def factor(self, batch_idx: int) -> Any:
        return sum(0.5**i for i in range(self.global_step + 1)) * [1.0, 2.0, 3.0][batch_idx]


class PowerAndNegative(Net):
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        return 0.9**self.global_step - (-batch_idx) // 2 + abs(-batch_idx)


class IntoATensor(Net):
    """Where no stand-in is understood, the number is asked for."""

    captures = 6

    def factor(self, batch_idx: int) -> Any:
        return torch.tensor(1 + self.global_step / 4, dtype=torch.float64)


class NumpyOfACounter(Net):
    captures = 6

    def factor(self, batch_idx: int) -> Any:
        return float(np.exp(-0.1 * self.global_step)) + float(np.clip(self.global_step / 4, 0, 1))


class Interpolated(Net):
    """Numbers as arguments of torch's functions."""

    captures = 6

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.smooth_l1_loss(
            out, torch.lerp(out, y, 1 / (1 + self.global_step)), beta=1 + self.global_step / 4
        )


class RateOfTheOptimizer(Net):
    schedule = "step"
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.log("lr", optimizer.param_groups[0]["lr"])
        return 1 + optimizer.param_groups[0]["lr"]


class RateOfTheScheduler(Net):
    schedule = "step"
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        scheduler: Any = self.lr_schedulers()
        self.log("lr", scheduler.get_last_lr()[0])
        return 1 + scheduler.get_last_lr()[0]


class RatePerEpoch(Net):
    schedule = "epoch"
    captures = 1

    def factor(self, batch_idx: int) -> Any:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return 1 + self.trainer.optimizers[0].param_groups[0]["lr"] * 2


class Drawn(Net):
    refused = HERE + r" .*draws random numbers"

    def factor(self, batch_idx: int) -> Any:
        return random.random()


class DrawnByNumpy(Net):
    refused = HERE + r" .*draws random numbers"

    def factor(self, batch_idx: int) -> Any:
        return np.random.rand()


class DrawnByOwnNumpy(Net):
    refused = HERE + r" .*draws random numbers"

    def build(self) -> None:
        self.rng = np.random.default_rng(0)

    def factor(self, batch_idx: int) -> Any:
        return self.rng.random()


class DrawnByOwnTorch(Net):
    refused = HERE + r" .*draws from its own torch\.Generator"

    def build(self) -> None:
        self.rng = torch.Generator()

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(out + torch.rand(2, generator=self.rng, dtype=out.dtype), y)


class Clock(Net):
    refused = (
        "(now differs from the captured step|the step reads different Python values|different versions of "
        "training_step): .*" + HERE
    )

    def factor(self, batch_idx: int) -> Any:
        return 1 + time.perf_counter()


class OtherIterator(Net):
    refused = r"the step takes the next value of the iterator self\.it"

    def build(self) -> None:
        self.it = itertools.count(1)

    def factor(self, batch_idx: int) -> Any:
        return 1.0 * next(self.it)


class File(Net):
    refused = "now differs from the captured step: .*" + HERE

    def build(self) -> None:
        self.path = Path(tempfile.mkdtemp(), "beta")
        self.path.write_text("1.0")

    def factor(self, batch_idx: int) -> Any:
        return float(self.path.read_text())

    def change(self, step: int) -> None:
        self.path.write_text(str(1 + step))


class Environment(Net):
    captures = 6

    def build(self) -> None:
        os.environ["TESTED_BETA"] = "1.0"

    def factor(self, batch_idx: int) -> Any:
        return float(os.environ["TESTED_BETA"])

    def change(self, step: int) -> None:
        os.environ["TESTED_BETA"] = str(1 + step)


class Appends(Net):
    refused = r"changes self\.seen"

    def build(self) -> None:
        self.seen: list[Any] = []

    def factor(self, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return 1.0


class Increments(Net):
    refused = r"changes self\.calls"

    def build(self) -> None:
        self.calls = 0

    def factor(self, batch_idx: int) -> Any:
        self.calls += 1
        return self.calls * 0.5


class IncrementsAnObject(Net):
    refused = r"changes self\.counter\.calls"

    def build(self) -> None:
        self.counter = Counter()

    def factor(self, batch_idx: int) -> Any:
        self.counter.calls += 1
        return self.counter.calls * 0.5


class Counter:
    calls = 0


CALLS = 0


class IncrementsAGlobal(Net):
    refused = r"changes CALLS"

    def factor(self, batch_idx: int) -> Any:
        global CALLS
        CALLS += 1
        return CALLS * 0.5


class SetsAClassAttribute(Net):
    refused = r"changes SetsAClassAttribute\.calls"
    calls: ClassVar[int] = 0

    def factor(self, batch_idx: int) -> Any:
        type(self).calls += 1
        return self.calls * 0.5


class SetsAnAttributeOfTheTrainer(Net):
    refused = HERE + r".* sets self\.trainer\.should_stop"

    def factor(self, batch_idx: int) -> Any:
        self.trainer.should_stop = True
        return 1.0


class SetsTheRate(Net):
    refused = HERE + r".* sets self\.trainer\..*param_groups\[0\]\[.lr.\]"

    def factor(self, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.1
        return 1.0


class ReadsAGradient(Net):
    refused = HERE + r".* reads the gradient of first\.weight"

    def hidden(self, x: Tensor) -> Tensor:
        return (
            self.first(x) if self.first.weight.grad is None else self.first(x) * self.first.weight.grad.sum()
        )


class ReadsAValue(Net):
    alone = True

    def build(self) -> None:
        self.register_buffer("beta", torch.ones(()))

    def factor(self, batch_idx: int) -> Any:
        return float(self.beta)  # type: ignore[arg-type]

    def change(self, step: int) -> None:
        self.beta += 1


class PlainTensor(Net):
    """Neither a parameter nor a buffer."""

    refused = HERE + ".*neither in the batch nor a parameter or buffer"

    def build(self) -> None:
        self.beta = torch.ones((), dtype=torch.float64)

    def factor(self, batch_idx: int) -> Any:
        return self.beta

    def change(self, step: int) -> None:
        self.beta += 1
