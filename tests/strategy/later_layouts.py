"""Trainings whose step takes another layout after the first batch: layers that join, take turns, or are
shared in some layouts alone, and buffers that only some layouts write.

Two processes run them in two stages, or in two replicas with a ZeRO stage. One device runs them as a
reference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_piper as piper
from lightning_piper.holdings.gradients import HolderExchange
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ops.update import Deliver
from lightning_piper.runtime.step_outputs import StepOutputs
from tests.strategy.fitting import QUIET

BATCHES = 4  # batches in an epoch


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.extra, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.double()

    @property
    def later(self) -> bool:
        return self.current_epoch >= 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.begin(batch[0]))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.end(h), batch[1])

    def begin(self, x: Tensor) -> Tensor:
        return self.first(x)

    def end(self, h: Tensor) -> Tensor:
        return self.second(h)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class Joins(Net):
    """A layer joins in the second epoch."""

    def end(self, h: Tensor) -> Tensor:
        return self.second(torch.tanh(self.extra(h)) if self.later else h)


class Clips(Net):
    """Clips gradients with torch's own function, which gets the parameters of the module."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class TakesTurns(Clips):
    """Two layers take turns from batch to batch."""

    def end(self, h: Tensor) -> Tensor:
        layer = self.extra if self.trainer.fit_loop.epoch_loop.batch_idx % 2 else self.spare
        return self.second(torch.tanh(layer(h)))


class JoinsBoth(Net):
    """Stages, a layer each, of which one leaves again."""

    def begin(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + self.spare(h) if self.current_epoch == 1 else h

    def end(self, h: Tensor) -> Tensor:
        return self.second(torch.tanh(self.extra(h)) if self.later else h)


class Counts(Net):
    """Counts batches of the second epoch in a buffer that no forward pass reads, on the stage that rank 0
    does not have.
    """

    def end(self, h: Tensor) -> Tensor:
        if self.later:
            self.seen.copy_(h.detach().abs().sum(0))
        return self.second(h)


class Freezes(Net):
    """Freezes a layer by setting an attribute."""

    def begin(self, x: Tensor) -> Tensor:
        if self.later:
            with torch.no_grad():
                return self.first(x)
        return self.first(x)


class FreezesBetween(Net):
    """Freezes a layer by setting an attribute between the batches of an accumulation, so that the step runs
    uncaptured.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.requires_grad_(batch_idx % 2 == 0)


class Unties(Net):
    """Both stages share a layer, except for an epoch in which only the first stage uses it."""

    def begin(self, x: Tensor) -> Tensor:
        return self.extra(self.first(x))

    def end(self, h: Tensor) -> Tensor:
        return self.second(self.spare(h) if self.current_epoch == 1 else self.extra(h))


KINDS = {kind.__name__: kind for kind in (Joins, TakesTurns, JoinsBoth, Counts, Freezes, Unties)}
WAYS: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 3},
}
QUICK = [("Unties", "clipped"), ("TakesTurns", "accumulated")]
ROWS = [(kind, way) for kind in KINDS for way in WAYS if (kind, way) not in QUICK]
RESUMED = [
    (checkpoint, step) for checkpoint in ("consolidated", "sharded") for step in (3, 6)
]  # before the layers join, and after
FROZEN = ("FreezesBetween", "accumulated")
STALE = ("Unties", "nothing handed on")
# Under a ZeRO stage. `Counts` is left out: each replica has its own value of the buffer, as under DDP.
QUICK_SHARDED = [("TakesTurns", "accumulated", 1), ("Unties", "clipped", 3)]
SHARDED = [
    row
    for row in itertools.product((kind for kind in KINDS if kind != "Counts"), WAYS, (1, 2, 3))
    if row not in QUICK_SHARDED
]
DELIVER = StepOutputs._deliver_flat
ALL_GRADIENTS = ("TakesTurns", "a gradient for every parameter of a bucket")


def stages(kind: str, **options: Any) -> piper.PiperStrategy:
    microbatches = 1 if kind == "Counts" else 2  # of the last of which it keeps something
    return piper.PiperStrategy(piper.schedules.one_f_one_b(stages=2, microbatches=microbatches), **options)


def sharded(stage: int) -> piper.PiperStrategy:
    # The parameters of the first layer either cross the boundary of two shards or lie whole in one.
    shard_by = "parameter" if stage == 2 else "elements"
    return piper.PiperStrategy([piper.Place([0, 1]), piper.Replicate(zero=stage, shard_by=shard_by)])


def fit(
    kind: str,
    strategy: Any,
    folder: Path,
    devices: int = 1,
    resume: Path | None = None,
    rank: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The module after three epochs, in the second of which layers join.

    Args:
        folder: Gets a checkpoint after each step.
        resume: The checkpoint to begin with.
        rank: The replica, which reads its half of each batch. None: a process reads whole batches.
    """
    module = (KINDS | {"FreezesBetween": FreezesBetween})[kind]()
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    about: dict[str, Any] = (
        QUIET | {"max_epochs": 3, "enable_checkpointing": True, "callbacks": [save]} | options
    )
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **about)
    data = TensorDataset(x, x[:, :2] * 2)
    own = None if rank is None else DistributedSampler(data, devices, rank, shuffle=False)
    trainer.fit(
        module, DataLoader(data, batch_size=8 if own is None else 8 // devices, sampler=own), ckpt_path=resume
    )
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(rank: int, folder: Path) -> dict[Any, dict[str, Tensor]]:
    found = trained(QUICK, folder)
    with mock.patch.object(HolderExchange, "exchange", lambda self, grads: None):
        found[STALE] = fit("Unties", stages("Unties"), folder / "stale", 2)
    found |= sharded_trained(QUICK_SHARDED, folder, rank)
    found[FROZEN] = fit(
        "FreezesBetween", sharded(1), folder / "frozen", 2, rank=rank, accumulate_grad_batches=2
    )
    with mock.patch.object(StepOutputs, "_deliver_flat", deliver_all):
        found[ALL_GRADIENTS] = fit(
            "TakesTurns", sharded(1), folder / "all gradients", 2, rank=rank, **WAYS["accumulated"]
        )
    return found


def train_more(rank: int, folder: Path) -> dict[Any, dict[str, Tensor]]:
    found = trained(ROWS, folder) | sharded_trained(SHARDED, folder, rank)
    for checkpoint, step in RESUMED:
        strategy, saved = partial(stages, "JoinsBoth", checkpoint=checkpoint), folder / checkpoint
        if step == RESUMED[0][1]:
            fit("JoinsBoth", strategy(), saved, 2)
        found[checkpoint, step] = fit(
            "JoinsBoth", strategy(), folder / f"{checkpoint} {step}", 2, saved / f"step={step}.ckpt"
        )
    return found


def deliver_all(self: StepOutputs, instruction: Deliver, bucket: Bucket, *others: Any) -> Any:
    """Deliver a gradient for every parameter of the bucket. Parameters that the layout does not use get
    zeros.
    """
    return DELIVER(self, dataclasses.replace(instruction, names=bucket.names), bucket, *others)


def sharded_trained(
    rows: Iterable[tuple[str, str, int]], folder: Path, rank: int
) -> dict[Any, dict[str, Tensor]]:
    return {
        (kind, way, stage): fit(
            kind, sharded(stage), folder / kind / f"{way} {stage}", 2, rank=rank, **WAYS[way]
        )
        for kind, way, stage in rows
    }


def trained(rows: Iterable[tuple[str, str]], folder: Path) -> dict[Any, dict[str, Tensor]]:
    found: dict[Any, dict[str, Tensor]] = {}
    for kind, way in rows:
        found[kind, way] = fit(kind, stages(kind), folder / kind / way, 2, **WAYS[way])
    return found
