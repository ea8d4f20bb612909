"""Trainings on two processes in which the user has compiled the whole module, a part of it, or a function
that the step calls.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET

compiled = partial(torch.compile, backend="eager", fullgraph=True)
SCALE = 1.0


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y) * SCALE


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Net(L.LightningModule):
    """A module whose loss and second part read state that changes from epoch to epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), Scaled(8, 4)
        self.kind, self.loss = kind, compiled(scaled) if kind == "a function" else scaled
        if kind == "a part":
            self.second = compiled(self.second)
        if kind == "a part in place":
            self.second.compile(backend="eager", fullgraph=True)
        if kind == "forward":
            self.forward = compiled(self.forward)  # type: ignore[method-assign]

    def configure_model(self) -> None:
        if self.kind == "a part, late":
            self.second = compiled(self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "forward":
            return self.loss(self(batch[0]), batch[1])
        with piper.annotate("PP", 0):
            hidden = self.first(batch[0])
        with piper.annotate("PP", 1):
            return self.loss(self.second(hidden), batch[1])

    def on_train_epoch_start(self) -> None:
        global SCALE
        SCALE = self.second.scale = 1.0 + self.current_epoch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


KINDS = ["nothing", "all", "a function", "a part", "a part in place", "a part, late", "forward"]
WHOLE = {"filter": {}, "devices": [0, 1]}
STRATEGIES: dict[str, Any] = {
    "DDP": DDPStrategy,
    "replicas": partial(
        piper.PiperStrategy, [piper.Place(**WHOLE), piper.Replicate(**WHOLE)], capture="always"
    ),
    "ZeRO-3": partial(
        piper.PiperStrategy,
        [piper.Place(**WHOLE), piper.Replicate(**WHOLE, shard_params=True)],
        capture="always",
    ),
    "as it is": partial(
        piper.PiperStrategy, [piper.Place(**WHOLE), piper.Replicate(**WHOLE)], capture="never"
    ),
    "stages": partial(piper.PiperStrategy, piper.schedules.gpipe(stages=2, microbatches=2), capture="always"),
}


def fit(kind: str, strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net(kind)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(32, 4, generator=draw, dtype=torch.float64) for _ in range(2)))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, precision="64-true", **QUIET
    )
    trainer.fit(
        torch.compile(module, backend="eager") if kind == "all" else module, DataLoader(data, batch_size=4)
    )
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def train(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        for name, strategy in STRATEGIES.items():
            if (kind, name) != ("forward", "stages"):  # a function of all stages
                torch.compiler.reset()
                found[kind, name] = fit(kind, strategy())
    return found
