"""Trainings with hooks that drop gradients, or that change after the first batch which parameters are
trained, on two processes and on one device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.cache import CACHE
from lightning_piper.session import auto_search
from tests.strategy.fitting import QUIET
from tests.strategy.test_auto import looking_at

PLACED = [piper.Place(filter={}, devices=[0, 1])]
LEVELS: dict[str, dict[str, Any]] = {
    "zero1": {"shard_optimizer": True}, "zero2": {"shard_grads": True}, "zero3": {"shard_params": True}
}  # fmt: skip


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 2),
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SetsNone(Net):
    """Sets gradients to None, as code does that skips a step whose gradients are not finite."""

    def on_after_backward(self) -> None:
        if self.global_step == 2:
            for p in self.parameters():
                p.grad = None


class Zeroes(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2:
            self.zero_grad(set_to_none=False)


class Clears(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.global_step == 2:
            self.zero_grad()


class Replaces(Net):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad = torch.ones_like(p)


class Unfreezes(Net):
    def on_fit_start(self) -> None:
        self.backbone[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone[0].requires_grad_(True)


class Adds(Net):
    """Adds parameter groups."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer = self.trainer.optimizers[0]
            optimizer.add_param_group({"params": list(self.backbone[0].parameters()), "lr": 0.001})
            optimizer.add_param_group({"params": list(self.backbone[2].parameters()), "lr": 0.02})


class FreezesInBetween(Net):
    """Freezes a layer between two batches of one accumulation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.backbone[0].requires_grad_(False)


class TakesTurns(Net):
    """Two heads take turns from batch to batch, also between the batches of one accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        head = self.other if self.trainer.fit_loop.epoch_loop.batch_idx % 2 else self.head
        return F.mse_loss(head(self.backbone(batch[0])), batch[1])


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[0], optimizer, lr=0.01)


class Tuned(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def configure_callbacks(self) -> Any:
        return [Finetuning()]


class Pruned(Net):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)]


class PrunedAtStart(Net):
    """Prunes a weight after the validation steps of the sanity check."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.head(self.backbone(batch)), batch[:, :2]))

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 6, dtype=torch.float64), batch_size=2)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        prune.l1_unstructured(self.head, "weight", amount=0.5)


class Centers(Net):
    """Gradients, and decays weights by their norms: with what only replicas have."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.decay(self.head)

    @staticmethod
    def decay(layer: nn.Linear) -> None:
        layer.weight.mul_(1 - 0.01 * layer.weight.norm())


IN_BETWEEN = (FreezesInBetween, TakesTurns)  # these accumulate two batches for each update
DROPPED, LATER, CALLBACKS = (SetsNone, Zeroes, Clears), (Unfreezes, Adds), (Tuned, Pruned, Centers)
KINDS = {kind.__name__: kind for kind in (*DROPPED, *LATER, *CALLBACKS, *IN_BETWEEN, PrunedAtStart, Replaces)}
ROWS = [
    *((kind.__name__, level) for kind in DROPPED for level in LEVELS),
    *(("FreezesInBetween", level) for level in ("replicas", "zero1", "zero2")),
    ("TakesTurns", "replicas"),
    *(("PrunedAtStart", level) for level in ("whole", "zero1", "zero3")),
    *((kind.__name__, level) for kind in LATER for level in ("zero1", "zero3", "auto")),
    *((kind.__name__, "whole") for kind in CALLBACKS),
    *((kind.__name__, "auto") for kind in CALLBACKS[:2]),
]
REFUSED = {
    ("Replaces", "zero1"): "cannot be replaced here, because this process does not",
    ("Tuned", "zero3"): "Lightning's BaseFinetuning compares the parameters that it unfreezes with those of",
}


def fit(kind: str, strategy: Any, rank: int | None = None, **options: Any) -> dict[str, Tensor]:
    """Train, and return the parameters. `rank` is one of two ranks, each of which reads every other sample."""
    module, processes = KINDS[kind](), 1 if rank is None else 2
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=draw, dtype=torch.float64)[rank or 0 :: processes]
    batches = 2 if KINDS[kind] in IN_BETWEEN else 1
    about: dict[str, Any] = (
        QUIET
        | {"max_epochs": 3, "use_distributed_sampler": False, "accumulate_grad_batches": batches}
        | options
    )
    trainer = L.Trainer(accelerator="cpu", devices=processes, strategy=strategy, **about)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :2] * 2), batch_size=8 // processes))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def strategy_of(level: str) -> Any:
    if level == "whole":
        return "piper"
    if level == "auto":
        return piper.PiperStrategy("auto", whole=False)
    return piper.PiperStrategy([*PLACED, piper.Replicate(filter={}, devices=[0, 1], **LEVELS.get(level, {}))])


def train(rank: int, folder: Path) -> dict[Any, Any]:
    os.environ[CACHE] = str(folder)
    auto_search.search = looking_at("pipeline")  # type: ignore[attr-defined]
    outcome: dict[Any, Any] = {row: fit(row[0], strategy_of(row[1]), rank) for row in ROWS}
    for kind, level in REFUSED:
        try:
            fit(kind, strategy_of(level), rank)
        except piper.PiperError as error:
            outcome[kind, level] = str(error)
    return outcome
