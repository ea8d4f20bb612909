"""Checks that spares can replace the processes of a run."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_piper.common.lightning_packages import is_a, is_exactly
from lightning_piper.common.limits import shown
from lightning_piper.errors import PiperError
from lightning_piper.processes.spares import SPARES


def checked_spares(spares: object, transport: str, local_sgd: object) -> int:
    """Return the strategy's argument `spares`, a number of processes.

    Raises:
        PiperError: It is not a number, or the other arguments allow no spares.
    """
    if not isinstance(spares, int) or isinstance(spares, bool) or spares < 0:
        raise PiperError(
            f"PiperStrategy(spares={shown(spares)}) is not usable. Give the number of spare processes, such as 1 "
            "[PIPER-S001]"
        )
    if spares and (transport != "process" or local_sgd is not None):
        found = f"transport={transport!r}" if transport != "process" else "local_sgd"
        raise PiperError(
            f"PiperStrategy(spares={spares}) does not support {found}. Remove one of the two [PIPER-S002]"
        )
    return spares


def check_spares(environment: ClusterEnvironment, processes: int, nodes: int, device: torch.device) -> None:
    """Check that spares can replace the processes of a run.

    Raises:
        PiperError: Another program than Lightning's launcher starts the processes, or the processes are on several
            machines, or they need NCCL, or there is one process, or the system is not Linux.
    """
    found = None
    if not is_exactly(environment, LightningEnvironment) or (
        environment.creates_processes_externally and SPARES not in os.environ
    ):
        found = (
            f"{type(environment).__name__} starts the processes, but only Lightning's launcher can replace one. Start "
            "one process: python train.py, or torchrun --nproc-per-node=1, or srun --ntasks=1 with "
            "Trainer(plugins=[LightningEnvironment()])"
        )
    elif nodes > 1:
        found = f"the Trainer has num_nodes={nodes}. Use one machine"
    elif processes == 1:
        found = "the Trainer has devices=1. Use several devices"
    elif device.type != "cpu":
        found = f"the device is {device}. Use Trainer(accelerator='cpu')"
    elif not hasattr(os, "memfd_create"):
        found = "this system does not have memory that processes share as files. Use Linux"
    if found is not None:
        raise PiperError(f"PiperStrategy(spares=...): {found}, or remove spares [PIPER-S003]")


def check_callbacks(trainer: pl.Trainer, spares: int) -> None:
    """Check that the callbacks of a fit can continue in the middle of an epoch.

    Raises:
        PiperError: A callback continues only at the start of an epoch.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(is_a(each, StochasticWeightAveraging) for each in callbacks):
        raise PiperError(
            f"PiperStrategy(spares={spares}) does not support StochasticWeightAveraging, which continues only at the start "
            "of an epoch. Use EMAWeightAveraging, or remove spares [PIPER-S002]"
        )
