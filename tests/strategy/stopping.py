"""Trainings that make a NaN in one batch, in each way that a guard must find or let pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, QUIET, Batches, trainer

NAN_IN = 2  # the batch with the NaN
PROGRAMS: dict[str, Any] = {
    "stages": list(PROGRAM),
    "replicas": None,
    "zero2": "zero2",
    "one": [piper.Place(filter={}, devices=[0])],
}


class Net(L.LightningModule):
    """A model with a batch norm, whose logarithm is NaN for a sample whose switch is negative."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.first, self.norm, self.second = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, switch, y = batch
        with piper.annotate("PP", 0):
            h = torch.log(switch) + self.norm(self.first(x))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class InBackward(Net):
    """A model whose loss is finite and whose gradient is NaN, if a switch is 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, switch, y = batch
        with piper.annotate("PP", 0):
            h = torch.sqrt(self.norm(self.first(x)).abs() * switch.relu())
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), y)


class Watching(Net):
    """A model whose own code leaves out a batch with a NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if torch.isnan(loss) else loss


class Cleaning(InBackward):
    """A model whose hook replaces gradients that are NaN."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for x in self.parameters():
            if x.grad is not None:
                x.grad.nan_to_num_()


class Ignored(Net):
    """A model whose loss is NaN and whose gradient is 0, if no label counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, switch, _ = batch
        with piper.annotate("PP", 0):
            h = self.norm(self.first(x))
        with piper.annotate("PP", 1):
            return F.cross_entropy(h, (switch > 0).long().squeeze(1) - 1, ignore_index=-1)


class Manual(InBackward):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(InBackward.training_step(self, batch, batch_idx))
        optimizer.step()


class Kept(L.Callback):
    """Keeps what this process trains, and the buffers that it holds, from before the batch with the NaN."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == NAN_IN:
            self.params, self.buffers = trained_by(trainer), list(module.buffers())
            self.before = [x.detach().clone() for x in self.params]
            self.filled = [torch.empty(0) if x.is_meta else x.clone() for x in self.buffers]

    def stayed(self, trainer: Any) -> bool:
        """Whether the parameters are still those."""
        return len(self.before) > 0 and all(map(torch.equal, trained_by(trainer), self.before))

    def buffers_stayed(self) -> bool:
        return all(map(torch.equal, self.buffers, self.filled))


def trained_by(trainer: Any) -> list[torch.Tensor]:
    return [x for group in trainer.optimizers[0].param_groups for x in group["params"]]


def batches(fails: bool = True, samples: slice = slice(5, 6), number: int = 4) -> Batches:
    draw = torch.Generator().manual_seed(0)
    made = [
        (torch.randn(8, 8, generator=draw), torch.ones(8, 1), torch.randn(8, 1, generator=draw))
        for _ in range(number)
    ]
    if fails:
        made[NAN_IN][1][samples] = -1.0
    return Batches(made)


def fit(strategy: Any, module: Any = None, fails: bool = True, callbacks: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    module = Net() if module is None else module
    options = {**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **options}
    found = L.Trainer(strategy=strategy, callbacks=[*callbacks], **options)
    found.fit(module, batches(fails, slice(8) if isinstance(module, Ignored) else slice(5, 6)))
    return found


def train(
    rank: int,
    program: str,
    kind: str,
    capture: str = "auto",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Train over two processes, and return the error, and whether the parameters stayed. Only rank 1
    has the NaN, if it draws its own data."""
    torch.manual_seed(0)
    module, kept = {"forward": Net, "backward": InBackward}[kind](), Kept()
    fails = program == "stages" or rank == 1
    if program != "stages":
        module.norm = nn.LayerNorm(6)  # type: ignore[assignment]
    strategy = piper.PiperStrategy(PROGRAMS[program], capture=capture)  # type: ignore[arg-type]
    found, _ = trainer(strategy, [kept], max_steps=-1, max_epochs=1, devices=2, **options)
    error = None
    try:
        found.fit(module, batches(fails))
    except piper.PiperError as raised:
        error = raised
    return {"error": error, "stayed": kept.stayed(found)}
