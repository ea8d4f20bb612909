"""Measures how long a training stops to save a checkpoint, synchronously and asynchronously.

    python benchmarks/saves.py [--megabytes 384] [--rounds 5] [--folder DIRECTORY]

The training is ZeRO-1 on two processes under the Trainer. The model and AdamW's states have `megabytes` MB
together. Synchronous and asynchronous saves alternate in one fit, with steps in between until each checkpoint
is written. Rank 0 prints medians in seconds: the duration of `trainer.save_checkpoint` for each kind of
checkpoint, and of a step with and without a checkpoint being written.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from _launch import is_rank, launch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainer import Environment

import lightning_piper as piper
from lightning_piper.processes.background import BackgroundThread

WIDTH = 512
KINDS = ("sharded", "consolidated")


class Wide(L.LightningModule):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = megabytes * 2**20 // (3 * 4 * WIDTH * WIDTH)  # parameters and two moments, in float32
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))

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
        began = time.perf_counter()
        trainer.save_checkpoint(self.folder / f"{later}.ckpt")
        self.saves[later].append(time.perf_counter() - began)


def fit(kind: Any, megabytes: int, rounds: int, folder: Path) -> Saving:
    torch.manual_seed(0)
    both: dict[str, Any] = {"filter": {}, "devices": [0, 1]}
    program = [piper.Place(**both), piper.Replicate(**both, shard_optimizer=True)]
    saving = Saving(folder / kind, rounds)
    L.Trainer(
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
    ).fit(Wide(megabytes), DataLoader(TensorDataset(torch.randn(100_000, WIDTH)), batch_size=4))
    return saving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if not is_rank():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            launch(2, f"--megabytes={given.megabytes}", f"--rounds={given.rounds}", f"--folder={folder}")
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in KINDS:
        found = fit(kind, given.megabytes, given.rounds, Path(given.folder))
        if os.environ["RANK"] == "0":
            first, (later, now) = (
                found.saves[True][0],
                (statistics.median(found.saves[how][1:]) for how in (True, False)),
            )
            busy, free = (statistics.median(found.steps[how][3:]) for how in (True, False))
            print(
                f"{kind:13} at once {now:.3f} s, behind {later:.3f} s (the first time {first:.3f} s): "
                f"{later / now:.1%}; steps {free:.3f} s, {busy:.3f} s while it is written",
                flush=True,
            )


if __name__ == "__main__":
    main()
