"""Fits that stop in the middle of an epoch and resume, each as one replica of several. In this process there is
one replica after another, each with the part of the data that it draws among processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_piper as piper
from lightning_piper.processes.world import World
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import sharing_captures, trainer


class Numbers(Dataset):
    """A sample has its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / self.length]), index


class Seeing(L.LightningModule):
    """Notes the samples of each epoch on which it is trained, and the batches of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[list[int]]] = {}
        self.indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.setdefault(self.current_epoch, []).append(batch[1].tolist())
        self.indices.append(batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Drawing(World):
    """One process, which draws the data of one replica of several."""

    def __init__(self, replicas: int, replica: int) -> None:
        super().__init__(0, 1, torch.device("cpu"), replicas=(replica,))
        self.of = replicas

    @property
    def count(self) -> int:
        return self.of

    @property
    def first_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.of))

    def gather(self, value: Any, ranks: Any = None) -> list[Any]:
        return [value] * self.of


class OneOf(piper.PiperStrategy):
    """A fit on one device, with the data of one replica of several."""

    def __init__(self, replicas: int, replica: int) -> None:
        super().__init__(transport="local")
        self._one_of = Drawing(replicas, replica)

    @property
    def is_distributed(self) -> bool:
        return self._one_of.count > 1

    @property
    def _drawing(self) -> World:
        return self._one_of


@dataclass(frozen=True)
class How:
    """How a fit draws its data."""

    replicas: int = 1
    batch_size: int = 2
    workers: int = 0
    shuffle: bool = True
    drop_last: bool = False
    accumulate: int = 1
    kind: Callable[..., Any] = DataLoader

    def loader(self, length: int, replica: int) -> Any:
        """Return the loader of a replica, which a Trainer divides over the replicas if it can."""
        return self.kind(
            Numbers(length),
            batch_size=self.batch_size,
            num_workers=self.workers,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )


@dataclass
class Fit:
    """What one replica has trained on, and its last checkpoint."""

    module: Seeing
    path: Path
    trainer: L.Trainer


class Stop(L.Callback):
    """Stops after some batches, and saves, also while gradients are accumulated."""

    def __init__(self, batches: int, path: Path) -> None:
        self.left, self.path = batches, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(
    how: How,
    loader: Callable[[], Any],
    folder: Path,
    replica: int = 0,
    stop: int | None = None,
    path: Path | None = None,
    epochs: int = 1,
    reseed: bool = True,
    more: Sequence[L.Callback] = (),
    steps: int = -1,
    make: Callable[[], Seeing] = Seeing,
    **options: Any,
) -> Fit:
    """Train one replica, from a checkpoint if there is a path, to the end of the epochs or for `stop` batches."""
    L.seed_everything(7 + (reseed and path is not None))  # the checkpoint has the order, not the seed
    module, out = make(), folder / f"{replica}.ckpt"
    callbacks: Sequence[L.Callback] = [] if stop is None else [Stop(stop, out)]
    made, _ = trainer(
        OneOf(how.replicas, replica),
        [*callbacks, *more],
        max_steps=steps,
        max_epochs=epochs,
        accumulate_grad_batches=how.accumulate,
        **options,
    )
    made.fit(module, loader(), ckpt_path=path)
    return Fit(module, out, made)


@sharing_captures
def together(
    how: How, length: int, folder: Path, stop: int | None = None, path: Path | None = None, **options: Any
) -> list[Fit]:
    """Train all replicas of a fit, one after another."""
    folder.mkdir(exist_ok=True)
    fits = [
        fit(how, partial(how.loader, length, replica), folder, replica, stop, path, **options)
        for replica in range(how.replicas)
    ]
    if stop is not None:
        _gather_states(fits)
    return fits


def _gather_states(fits: Sequence[Fit]) -> None:
    """Write into the first replica's checkpoint the states of each replica's loaders, which among processes are
    gathered when the checkpoint is saved."""
    saved = [torch.load(each.path, weights_only=True) for each in fits]
    of_loaders = [content["lightning_piper"]["loaders"]["loaders"] for content in saved]
    for index, entry in enumerate(of_loaders[0]):
        if "states" in entry:
            entry["states"] = [
                entries[index]["states"][replica] for replica, entries in enumerate(of_loaders)
            ]
    torch.save(saved[0], fits[0].path)


def samples(fits: Sequence[Fit], epoch: int = 0) -> list[int]:
    return sorted(x for each in fits for batch in each.module.seen.get(epoch, []) for x in batch)


def on_processes(rank: int, how: How, length: int, jobs: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """Run fits on real processes, each a replica, one after another; the samples of each fit, by its index."""
    found: dict[int, Any] = {}
    for index, job in enumerate(jobs):
        L.seed_everything(7 + index)
        module, stop = Seeing(), job.get("stop")
        made, _ = trainer(
            piper.PiperStrategy(timeout=PATIENCE),
            [] if stop is None else [Stop(stop, job["save"])],
            devices=how.replicas,
            max_steps=-1,
            max_epochs=1,
        )
        made.fit(module, how.loader(length, rank), ckpt_path=job.get("path"))
        found[index] = module.seen.get(0, [])
    return found
