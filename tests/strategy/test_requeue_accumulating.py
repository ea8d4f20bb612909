"""The signal of SLURM is noticed after each step of the optimizer, for any number of accumulated batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_piper.processes.world import World
from lightning_piper.strategy.process_management import Requeue
from tests.strategy.fitting import QUIET


def steps_of_saves(callbacks: list[L.Callback], batches: int, epochs: int, **options: Any) -> list[int]:
    """Return the Trainer's steps when the handler runs, if each batch brings the signal."""
    saves: list[int] = []

    class Signal(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            requeue.note(0, None)

    requeue = Requeue(lambda: saves.append(trainer.global_step), World(0, 1, torch.device("cpu")))
    options = {**QUIET, "accelerator": "cpu", "limit_train_batches": batches, **options}
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=[*callbacks, Signal(), requeue], limit_val_batches=0, **options
    )
    trainer.fit(BoringModel())
    return saves


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_shorter_than_an_accumulation() -> None:
    assert steps_of_saves([], batches=2, epochs=3, accumulate_grad_batches=4) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_number_of_batches_that_changes() -> None:
    changing = GradientAccumulationScheduler({0: 1, 1: 3})
    assert steps_of_saves([changing], batches=3, epochs=2) == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_saved_within_an_accumulation() -> None:
    """A control: with more batches than steps, some batches do not save."""
    assert steps_of_saves([], batches=4, epochs=1, accumulate_grad_batches=2) == [1, 2]
