"""Measures how long a training stops to save a checkpoint, synchronously and asynchronously.

    python benchmarks/saves.py [--megabytes 384] [--width 512] [--rounds 5] [--folder DIRECTORY]

The training runs on two processes under the Trainer: ZeRO-1 for a sharded checkpoint, and replicas or ZeRO-1 for one
file. The model and AdamW's states have `megabytes` MB together, in matrices of `width` rows and columns. Synchronous
and asynchronous saves alternate in one fit, with steps in between until each checkpoint is written. Rank 0 prints
medians in milliseconds:

- the duration of `trainer.save_checkpoint`, synchronous and asynchronous;
- the CPU time of the main thread in the asynchronous call, and how long the next updates waited for its copies;
- the duration of a step with and without a checkpoint being written.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import torch
from _launch import is_rank, launch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainer import Environment

import lightning_piper as piper
from lightning_piper.checkpoint.late_copies import LateCopies
from lightning_piper.processes.background import BackgroundThread

# name -> (kind of the checkpoint, stage of ZeRO)
TRAININGS: dict[str, tuple[Any, int]] = {
    "sharded, ZeRO-1": ("sharded", 1),
    "one file, replicas": ("consolidated", 0),
    "one file, ZeRO-1": ("consolidated", 1),
}


class Wide(L.LightningModule):
    def __init__(self, megabytes: int, width: int) -> None:
        super().__init__()
        count = megabytes * 2**20 // (3 * 4 * width * width)  # parameters and two moments, in float32
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Saving(L.Callback):
    """A callback that saves when no checkpoint is being written, alternately synchronously and
    asynchronously.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.left = folder, 2 * (rounds + 1)
        self.saves: dict[bool, list[float]] = {True: [], False: []}
        self.cpu: dict[bool, list[float]] = {True: [], False: []}
        self.waits: list[float] = []  # of the updates, since the last save
        self.waited: list[float] = []  # for each asynchronous save
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.busy, self.began = self.is_writing(trainer), time.perf_counter()

    def is_writing(self, trainer: L.Trainer) -> bool:
        behind: BackgroundThread = trainer.strategy._saves._behind  # type: ignore[attr-defined]
        return trainer.strategy.reduce_boolean_decision(behind._busy, all=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps[self.busy].append(time.perf_counter() - self.began)
        if self.is_writing(trainer) or batch_idx % 5 != 4:
            return
        if self.left == 0:
            trainer.should_stop = True
            return
        later = self.left % 2 == 0
        trainer.strategy.checkpoint_io = AsyncCheckpointIO() if later else None
        self.left -= 1
        trainer.strategy.barrier()
        if not later:  # the save before was asynchronous
            self.waited.append(sum(self.waits))
        self.waits.clear()
        began, cpu = time.perf_counter(), time.thread_time()
        trainer.save_checkpoint(self.folder / f"{later}.ckpt")
        self.saves[later].append(time.perf_counter() - began)
        self.cpu[later].append(time.thread_time() - cpu)


@contextmanager
def measuring(waits: list[float]) -> Iterator[None]:
    """Append the duration of each wait for copies to `waits`."""
    settle = LateCopies.settle

    def measured(copies: LateCopies) -> None:
        began = time.perf_counter()
        settle(copies)
        waits.append(time.perf_counter() - began)

    with mock.patch.object(LateCopies, "settle", measured):
        yield


def fit(kind: Any, stage: int, megabytes: int, width: int, rounds: int, folder: Path) -> Saving:
    torch.manual_seed(0)
    both: dict[str, Any] = {"filter": {}, "devices": [0, 1]}
    program = [piper.Place(**both), piper.Replicate(**both, zero=stage)]
    saving = Saving(folder / f"{kind} {stage}", rounds)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=piper.PiperStrategy(program, checkpoint=kind),
        max_epochs=1,
        callbacks=[saving],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Environment()],
    )
    with measuring(saving.waits):
        data = TensorDataset(torch.randn(100_000, width))
        trainer.fit(Wide(megabytes, width), DataLoader(data, batch_size=4))
    return saving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if not is_rank():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            options = [f"--{name}={getattr(given, name)}" for name in ("megabytes", "width", "rounds")]
            launch(2, *options, f"--folder={folder}")
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, (kind, stage) in TRAININGS.items():
        found = fit(kind, stage, given.megabytes, given.width, given.rounds, Path(given.folder))
        if os.environ["RANK"] == "0":
            # the first asynchronous save allocates memory and makes the plan
            later, now = (statistics.median(found.saves[how][1:]) * 1e3 for how in (True, False))
            cpu, waited = (
                statistics.median(found.cpu[True][1:]) * 1e3,
                statistics.median(found.waited[1:]) * 1e3,
            )
            busy, free = (statistics.median(found.steps[how][3:]) * 1e3 for how in (True, False))
            print(
                f"{name:19} at once {now:.0f} ms, behind {later:.0f} ms with {cpu:.1f} ms of CPU ({cpu / free:.1%} of a "
                f"step), updates waited {waited:.1f} ms; steps {free:.0f} ms, {busy:.0f} ms while it is written",
                flush=True,
            )


if __name__ == "__main__":
    main()
