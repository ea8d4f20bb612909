"""Trainings whose hook skips the rest of an epoch, on all processes or on one."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET

WHERE = (0, 2)  # the batch of the first epoch at which the hook skips
STRATEGIES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "zero1": {"directives": [piper.Place([0, 1]), piper.Replicate(zero=1)]},
    "stages": {"directives": [piper.Place([i], filter={"PP": i}) for i in range(2)]},
    "uncaptured": {"capture": "never"},
}


class Net(L.LightningModule):
    """A module that skips at one batch: on `ranks`, or on all ranks if they `decide` together."""

    def __init__(self, at: int, ranks: tuple[int, ...], decide: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.at, self.ranks, self.decide = at, ranks, decide

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = self.first(batch[0]).tanh()
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(hidden), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        skip = self.current_epoch == 0 and batch_idx == self.at and self.global_rank in self.ranks
        if self.decide:
            skip = self.trainer.strategy.reduce_boolean_decision(skip, all=False)
        return -1 if skip else None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, devices: int, module: Net) -> int:
    """Return the number of steps of two epochs of four batches."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    options: Any = QUIET | {"max_epochs": 2, "max_steps": -1, "use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :2]), batch_size=4))
    return trainer.global_step


def train(rank: int) -> dict[Any, Any]:
    """Return, by strategy, batch and case, the number of steps or the error."""
    found: dict[Any, Any] = {}
    for name, given in STRATEGIES.items():
        for at in WHERE:
            for case, ranks, decide in (
                ("all", (0, 1), False),
                ("one", (1,), False),
                ("decided", (1,), True),
            ):
                try:
                    found[name, at, case] = fit(piper.PiperStrategy(**given), 2, Net(at, ranks, decide))
                except piper.PiperError as error:
                    found[name, at, case] = str(error)
    return found
