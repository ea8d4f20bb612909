"""A callback that saves the batches at which the loss of a training jumps."""

from __future__ import annotations

import io
import math
import os
import pickle
import statistics
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.optim import Optimizer

from lightning_piper.common.limits import is_number
from lightning_piper.errors import PiperError
from lightning_piper.strategy.compatibility import grad_norm
from lightning_piper.strategy.process_management import OverProcesses

MOST = 20  # files of one fit on each replica, so that a diverging training does not fill the disk


class SpikeRecorder(pl.Callback):
    """Saves the batch, the loss and the gradient norm of each training batch whose loss is much larger than
    before.

        Trainer(callbacks=[SpikeRecorder("spikes", factor=3.0)])

    A loss is a spike if it is NaN or infinite, or if it exceeds `factor` times the median of the last `window`
    losses. The first `window` batches are not compared. The loss must be positive. It is the mean over the
    replicas, so all of them save their parts of the batch.

    Each replica writes `FOLDER/step=412-batch=3-replica=0.pt` before the update, even if the update then raises an
    error. `torch.load(path, weights_only=False)` returns a dict: `epoch`, `step` (updates before this one),
    `batch_idx`, `loss`, `median`, `norm` (the 2-norm of all gradients before clipping) and `batch`, on the CPU. A
    fit writes at most 20 files on each replica. The callback reads a number from the device in each batch, and
    with several processes it sums a number.

    Args:
        folder: Local folder for the files.
        factor: A loss above `factor` times the median is a spike.
        window: Over how many losses the median is taken.

    Raises:
        PiperError: `factor` is not above 1, or `window` is not above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], factor: float = 3.0, window: int = 100) -> None:
        if not (is_number(factor) and factor > 1 and isinstance(window, int) and window >= 1):
            raise PiperError(
                f"SpikeRecorder(factor={factor!r}, window={window!r}) is not usable. Give a factor above 1 and a window of "
                "at least one batch [PIPER-S001]"
            )
        self._folder, self._factor = Path(folder), factor
        self._losses: deque[float] = deque(maxlen=window)
        self._batch: tuple[Any, int] = (None, 0)
        self._spikes: list[dict[str, Any]] = []  # since the last update
        self._files = 0

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.extend(state_dict["losses"])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the module trains with one loss.

        Raises:
            PiperError: The module steps its optimizers itself.
        """
        if stage == "fit" and not pl_module.automatic_optimization:
            raise PiperError(
                "SpikeRecorder needs a step that returns one loss, but the module has "
                "automatic_optimization=False. Remove the callback [PIPER-S002]"
            )
        self._files, self._spikes = 0, []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Compare the loss of a batch, in which Lightning has divided by the number of batches of an update."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        mean = trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        value = float(mean) * trainer.accumulate_grad_batches / scale
        full = len(self._losses) == self._losses.maxlen
        median = statistics.median(self._losses) if full else math.inf
        if not math.isfinite(value) or value > self._factor * median > 0:
            batch, batch_idx = self._batch
            found = {"epoch": trainer.current_epoch, "step": trainer.global_step, "batch_idx": batch_idx}
            self._spikes.append({**found, "loss": value, "median": median, "batch": batch})
        if math.isfinite(value):
            self._losses.append(value)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Save the spikes since the last update. All replicas have found the same spikes, so the gradient norm may be
        collective."""
        spikes, self._spikes = self._spikes, []
        self._batch = None, 0
        if not spikes or self._files >= MOST:
            return
        norm = grad_norm(pl_module).get("grad_2.0_norm_total")
        for spike in spikes[: MOST - self._files]:
            self._files += 1
            self._save({**spike, "norm": None if norm is None else float(norm)}, trainer)

    def _save(self, spike: dict[str, Any], trainer: pl.Trainer) -> None:
        strategy: Any = trainer.strategy
        replica = trainer.global_rank
        if isinstance(strategy, OverProcesses):
            replica = strategy.world.replica
            if strategy.world.rank not in strategy.world.first_ranks:
                return
        path = self._folder / f"step={spike['step']}-batch={spike['batch_idx']}-replica={replica}.pt"
        try:
            torch.save(move_data_to_device(spike, torch.device("cpu")), content := io.BytesIO())
        except (RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
            warnings.warn(
                f"SpikeRecorder could not save the batch: {error}. In the collate function, return only data that "
                "torch.save can write [PIPER-W030]",
                stacklevel=2,
            )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getbuffer())
        except OSError as error:
            warnings.warn(
                f"SpikeRecorder could not write {path}: {error}. Give another folder [PIPER-W030]",
                stacklevel=2,
            )
