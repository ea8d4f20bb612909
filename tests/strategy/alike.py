"""A script that Lightning's launcher starts for each of two devices, without a setting for the number of
threads. It searches a program at the first batch, and each process writes how many threads it had.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

import lightning_piper as piper
from tests.strategy.fitting import QUIET
from tests.strategy.models import make

if __name__ == "__main__":
    torch.manual_seed(0)
    module, loader = make("mlp", samples=16, batch_size=4)
    strategy = piper.PiperStrategy("auto", whole=False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(module, loader)
    Path(sys.argv[1], f"rank{trainer.global_rank}").write_text(
        f"{torch.get_num_threads()} {trainer.global_step}"
    )
