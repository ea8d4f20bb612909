"""The modules of the matrix: one whose training step is captured, and two whose training step cannot be
captured and runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from tests.strategy import evaluated

Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    """An optimizer to which the scale of the gradients matters."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Net(evaluated.Net):
    """A model that also logs its loss and has metrics in double precision."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def on_validation_epoch_start(self) -> None:
        for metric in (self.mean_output, self.mean_target):
            metric.set_dtype(torch.float64)  # moving the metric to a device undoes this

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with piper.annotate("PP", 1):
            self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test_loss", super().training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Recurrent(Net):
    """Works on each sample as often as the sample's values demand; each replica does so with its own samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(torch.stack([self.second(self.hidden(row)) for row in x]), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def hidden(self, row: Tensor) -> Tensor:
        hidden, largest = self.first(row) + self.shift, row.abs().max()
        while largest > 1:  # of the data alone, so that rounding changes nothing about it
            hidden, largest = self.first(row + hidden[:8]) + self.shift, largest - 0.5
        return hidden


class Adversarial(Net):
    """Two networks that are optimized by hand, each with its optimizer and its schedule: one schedule takes a
    step at each batch, the other at each epoch.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        maker, judge = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(maker)
        out = self(x)
        loss = F.mse_loss(out, y) + F.softplus(-self.judge(out)).mean()
        self.descend(maker, loss)
        self.toggle_optimizer(judge)
        judged = F.softplus(-self.judge(y)).mean() + F.softplus(self.judge(self(x).detach())).mean()
        self.descend(judge, judged)
        self.lr_schedulers()[0].step()  # type: ignore[index, union-attr, call-arg]
        self.log_dict(
            {"train_loss": loss, "train_judged": judged}, on_step=True, on_epoch=True, sync_dist=True
        )
        for name, each in (("maker", maker), ("judge", judge)):
            self.log(f"train_rate_of_{name}_step", each.param_groups[0]["lr"])
        return {"loss": loss.detach(), "judged": judged.detach()}

    def descend(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()  # type: ignore[index, union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        judging = list(self.judge.parameters())
        ours = [
            self.optimizer([p for p in self.parameters() if all(p is not x for x in judging)]),
            self.optimizer(judging),
        ]
        return ours, [torch.optim.lr_scheduler.ExponentialLR(each, 0.98) for each in ours]


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        module: The module that is trained.
        captured: Whether its training step is captured. If not, each replica has its own losses, and one
            device has their mean.
        without: The scenarios that Lightning refuses for it -> the error.
    """

    module: Callable[[Optimizer], Net]
    captured: bool = False
    without: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "captured": Kind(Net, captured=True),
    "loop by values": Kind(Recurrent),
    "two optimizers": Kind(Adversarial, without={
        "clip": "Automatic gradient clipping is not supported for manual optimization",
        "accumulate": "Automatic gradient accumulation is not supported for manual optimization",
    }),
}  # fmt: skip
