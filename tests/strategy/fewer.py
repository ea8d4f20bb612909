"""A training that loses processes, has no spare left, and continues with fewer replicas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, SumMetric

import lightning_piper as piper
from lightning_piper.processes.spares import Spares
from lightning_piper.strategy.saving import SavingStrategy
from lightning_piper.strategy.spares import _lightning
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import trainer, values
from tests.strategy.models import make
from tests.strategy.spared import Launched, Losing, Loss, become, samples

SAMPLES, EPOCHS = 60, 3
PROGRAMS: dict[str, Any] = {
    "uncaptured": {"directives": "ddp"},
    "searched": {"directives": "auto", "whole": False},
    "listed": {"directives": piper.schedules.gpipe(stages=2, microbatches=2)},
}


class Counted(L.LightningModule):
    """Counts its samples in each epoch, and logs the mean and the largest value of all of them."""

    def __init__(self, uncaptured: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.uncaptured = uncaptured
        self.random = dict[int, list[bytes]]()  # the states of random numbers before each batch
        self.count, self.all = SumMetric(), CatMetric()

    def on_train_batch_start(self, *args: Any) -> None:
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        self.random.setdefault(batches.total.ready, []).append(torch.get_rng_state().numpy().tobytes())

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            x = self.layers[:2](x)
        with piper.annotate("PP", 1):
            return self.layers[2](x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.uncaptured and float(x.sum()) == 0.5:
            x = x + 1
        self.count(torch.ones(len(y)))
        self.all(y.flatten())
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("mean", y.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", y.max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return (self(x) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("sorted", self.all.compute().sort().values[:8][-1])  # fewer in a fit that resumes
        self.all.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(
    rank: int,
    folder: Path,
    size: int,
    kind: str,
    losses: Sequence[Loss] = (),
    path: Path | None = None,
) -> dict[str, Any]:
    """Train on `size` processes. Ranks from `size` on are spares.

    Args:
        kind: The first word is the ZeRO stage, or one of `PROGRAMS`. Then what is special: "averages", "in order" (of the
            samples), or a part of the copies that the remaining processes do not take ("without states", "without lost").
        losses: The losses of processes.
        path: A checkpoint from which the training continues.
    """
    spares = become(rank, size, folder)
    stage, _, special = kind.partition(" ")
    degrees = PROGRAMS[stage] if stage in PROGRAMS else {"zero": int(stage)}
    if special == "without states":
        SavingStrategy.load_checkpoint.__globals__["add_optimizer_states"] = lambda content, more: None
    elif special == "without lost":
        _lightning.add_lost = lambda *given: None
    strategy = piper.PiperStrategy(**degrees, spares=spares, timeout=PATIENCE)
    gather, watched = Spares.gather, list[bool]()

    def gathering(*given: Any) -> Any:
        watched.append(strategy._is_watched())
        return gather(*given)

    Spares.gather = gathering  # type: ignore[method-assign]
    losing = Losing(losses, folder)
    save = ModelCheckpoint(folder / "saved", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks: list[L.Callback] = [losing, Launched(losing, size, spares, folder)] if losses else [save]
    averages = [EMAWeightAveraging()] if "averages" in special else []
    fit, record = trainer(
        strategy,
        [*callbacks, *averages],
        devices=size,
        max_steps=-1,
        max_epochs=EPOCHS,
        precision="64-true",
        enable_checkpointing=not losses,
        val_check_interval=2,
    )
    module = Counted(stage == "uncaptured").double()
    data = TensorDataset(*samples(SAMPLES))
    loader = DataLoader(data, batch_size=4, shuffle="in order" not in special)
    if losses:
        losing.in_data(fit, loader)
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit.fit(module, loader, DataLoader(data, batch_size=4), ckpt_path=path)
    return {
        "values": values(module),
        "steps": fit.global_step,
        "devices": fit.world_size,
        "watched": watched,
        "random": {number: len({*states}) for number, states in module.random.items()},
        "validated": fit.callback_metrics["validated"],
        "told": [str(each.message) for each in told if "[PIPER-W033]" in str(each.message)],
        "epochs": [{name: float(x) for name, x in each.items()} for each in record.epochs],
    }


def train_on_more(rank: int, size: int) -> str:
    """Fit with a Trainer, and then with a Trainer that has one more process. Return its error."""
    module, data = make("mlp", samples=16)
    for devices in (size, size + 1):
        fit, _ = trainer(piper.PiperStrategy(timeout=PATIENCE), devices=devices, max_epochs=1, max_steps=-1)
        try:
            fit.fit(module, data)
        except piper.PiperError as error:
            return str(error)
    return ""
