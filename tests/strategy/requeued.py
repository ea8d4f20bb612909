"""Two tasks of a SLURM job that is told to end soon. Each gets the signal at another moment, one of them in
the middle of a step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import sharing_captures, trainer, values
from tests.strategy.models import make
from tests.strategy.sharded import dp2

STEPS = 6
SAVED = 3  # finished steps when both tasks save


class Told(L.Callback):
    """Gets the signal in the third step: rank 0 in the middle of its plan, rank 1 after its update."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED - 1 and trainer.global_rank == 0:
            for prepared in trainer.strategy.phase.fit.programs._prepared.values():  # type: ignore[attr-defined]
                prepared.executors[0].observer = self.instead

    def instead(self, code: list[Callable[[], Any]], source: Any) -> list[Callable[[], Any]]:
        place = len(code) // 2

        def told() -> Any:
            if not self.was_told:
                self.was_told = True
                os.kill(os.getpid(), signal.SIGUSR1)
            return code[place]()

        return [*code[:place], told, *code[place + 1 :]]

    was_told = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


@sharing_captures
def train(rank: int, folder: Path, checkpoint: Any, told: bool) -> dict[str, Any]:
    """Train as one of two tasks of a node; `scontrol` is a program of the test."""
    os.environ |= {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    assert SLURMEnvironment.detect()
    module, loader = make("dropout", samples=8 * SAVED, batch_size=4)  # samples for two replicas
    strategy = piper.PiperStrategy(
        dp2(1), timeout=PATIENCE, checkpoint=checkpoint, checkpoint_io=AsyncCheckpointIO()
    )
    callbacks = [Told()] if told else []
    fit, record = trainer(strategy, callbacks, devices=2, max_steps=STEPS, default_root_dir=folder)
    torch.manual_seed(9)
    fit.fit(module, loader)
    return {"values": values(module), "losses": record.losses}
