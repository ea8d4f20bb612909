"""A training script with Lightning's command line, as a user writes it: `python command_line.py fit --config
config.yaml`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningCLI

import lightning_piper as piper
from tests.strategy.fitting import QUIET
from tests.strategy.models import MLP, vectors

PROGRAM = piper.schedules.one_f_one_b(stages=2, microbatches=4)
DEFAULTS = {**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": 3}


class Net(MLP):
    """A module that has its data."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__()

    def train_dataloader(self) -> Any:
        return vectors()


class WithDirectives(Net):
    """A module that has its program, as a path."""

    piper_directives = "program.json"


if __name__ == "__main__":
    cli = LightningCLI(
        Net, seed_everything_default=1, trainer_defaults=DEFAULTS, save_config_kwargs={"overwrite": True}
    )
    torch.save(cli.model.state_dict(), Path(f"values_{os.environ.get('LOCAL_RANK', 0)}.pt"))
