"""A script that trains on two processes with a spare. torchrun starts one process, and Lightning's launcher starts the
other processes. In the first attempt, rank 1 is lost in the second epoch, and rank 0 in the third epoch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET, values
from tests.strategy.spared import Net, samples


class Losing(L.Callback):
    """Loses each rank once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        rank = trainer.global_rank
        lost = self.folder / f"lost {rank}"
        if trainer.current_epoch == 2 - rank and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, spares: int = 1) -> dict[str, Tensor]:
    module = Net(norms=True).double()  # Lightning converts the module after it has loaded the values
    module.setup = lambda stage: setattr(module, "shift", torch.zeros(()))  # type: ignore[method-assign]
    save = ModelCheckpoint(folder / "saved", save_last=True)
    strategy = piper.PiperStrategy(spares=spares)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        precision="64-true",
        callbacks=[save, Losing(folder)],
        **QUIET | {"enable_checkpointing": True},  # type: ignore[arg-type]
    )
    torch.manual_seed(9)
    loaders = [DataLoader(TensorDataset(*samples(32)), batch_size=4) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path="last")
    return values(module)


def undisturbed(rank: int, folder: Path) -> dict[str, Tensor]:
    """Train on two processes that this function does not start, without losses."""
    folder.mkdir(exist_ok=True)
    for lost in range(2):
        (folder / f"lost {lost}").touch()
    return train(folder, spares=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = train(Path(sys.argv[1]))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        torch.save({"attempt": attempt, "values": found}, Path(sys.argv[1], "end.pt"))
