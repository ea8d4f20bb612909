"""A training under `Trainer(detect_anomaly=True)`. On demand, the backward pass of one stage gives a NaN in
the third batch.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, Batches, trainer

NAN_IN = 2  # the batch with the NaN


class Net(L.LightningModule):
    """A model whose gradient is NaN for a sample whose switch is 0, because the infinite slope of a square
    root is multiplied by it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, switch, y = batch
        with piper.annotate("PP", 0):
            h = torch.sqrt(self.first(x).abs() * switch)
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def batches(fails: bool = False) -> Batches:
    draw = torch.Generator().manual_seed(0)
    made = [
        (torch.randn(8, 8, generator=draw), torch.ones(8, 1), torch.randn(8, 1, generator=draw))
        for _ in range(4)
    ]
    if fails:
        made[NAN_IN][1][5] = 0.0
    return Batches(made)


def fit(
    strategy: Any, fails: bool = False, module: L.LightningModule | None = None, **options: Any
) -> L.Trainer:
    torch.manual_seed(0)
    found, _ = trainer(strategy, **{"max_steps": -1, "max_epochs": 1, "detect_anomaly": True, **options})
    found.fit(Net() if module is None else module, batches(fails))
    return found


def train(rank: int, program: str, capture: str = "auto") -> None:
    directives = {"stages": list(PROGRAM), "replicas": None, "auto": "auto"}[program]
    fit(piper.PiperStrategy(directives, capture=capture), fails=True, devices=2)  # type: ignore[arg-type]
