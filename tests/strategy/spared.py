"""A training on processes of which one is lost at some moment, and a spare that replaces it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.checkpoint.memory_copy import MemoryCopy
from lightning_piper.processes.spares import SPARE, SPARES
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import trainer, values

EPOCHS, BATCHES, LOST_IN = 3, 4, 5  # the process is lost in the batch with this number, in all epochs
MOMENTS = ("data", "forward", "update", "validation", "save")


class Net(L.LightningModule):
    """Trains with dropout, batch statistics of the whole batch, and a learning rate that follows steps and validations."""

    def __init__(self, uncaptured: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.uncaptured = uncaptured

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not self.uncaptured:
            x = torch.dropout(x, 0.2, True)
        elif float(x.sum().detach()) == 0.5:
            x = x + 1
        loss = (self(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validated"}}


class Losing(L.Callback):
    """Kills its process at a moment of a batch, or of the validation or the save after it."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def at(self, trainer: L.Trainer, moment: str) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready - (moment != "data")
        if self.moment == moment and done == LOST_IN and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_data(self, fit: L.Trainer, loader: DataLoader[Any]) -> None:
        collate = loader.collate_fn

        def collating(samples: Any) -> Any:
            self.at(fit, "data")
            return collate(samples)

        loader.collate_fn = collating

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        phase: Any = trainer.strategy.phase  # type: ignore[attr-defined]
        for prepared in phase.fit.programs._prepared.values() if hasattr(phase, "fit") else ():
            prepared.executors[0].observer = lambda code, source: self.instead(trainer, code)

    def instead(self, trainer: L.Trainer, code: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """The instructions of a plan, of which one may lose the process."""

        def failing() -> Any:
            self.at(trainer, "forward")
            return code[1]()

        return [code[0], failing, *code[2:]]

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "update")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "validation")

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: Any) -> None:
        if trainer.validating:
            self.at(trainer, "save")


class Alive:
    """Stands for a process that another process has started."""

    def __init__(self, ended: int | None = None) -> None:
        self.ended = ended

    def poll(self) -> int | None:
        return self.ended


def train(rank: int, folder: Path, size: int, moment: str, kind: str = "") -> dict[str, Any]:
    """Train on `size` processes. Ranks from `size` on are spares. Rank 1 is lost at a moment; at no moment if
    `moment` is empty.

    Args:
        kind: What is special about the training.
    """
    spares = int(os.environ["WORLD_SIZE"]) - size
    os.environ[SPARES] = str(spares)
    if rank >= size:
        os.environ |= {"LOCAL_RANK": "1", SPARE: str(rank - size)}
    if kind == "changed copy":
        take = MemoryCopy.take

        def changed(copy: MemoryCopy, world: Any) -> Any:
            content = take(copy, world)
            content["state_dict"]["first.bias"][0] += 1e-9
            return content

        MemoryCopy.take = changed  # type: ignore[method-assign]
    accumulated = 2 if kind == "accumulated" else 1
    chance = torch.Generator().manual_seed(1)
    samples = BATCHES * 4 * size
    data = TensorDataset(*(torch.randn(samples, n, generator=chance, dtype=torch.float64) for n in (8, 1)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    losing = Losing(moment)
    lost = (
        moment and os.environ["LOCAL_RANK"] == ("0" if kind == "rank 0" else "1") and SPARE not in os.environ
    )
    save = ModelCheckpoint(folder / "saved", monitor="validated", filename="{step}", save_top_k=1)
    strategy = piper.PiperStrategy("zero1" if kind == "sharded" else "ddp", spares=spares, timeout=PATIENCE)
    fit, record = trainer(
        strategy,
        [save, losing] if lost else [save],
        devices=size,
        max_steps=-1,
        max_epochs=EPOCHS,
        precision="64-true",
        sync_batchnorm=True,
        val_check_interval=2,
        accumulate_grad_batches=accumulated,
        enable_checkpointing=True,
    )
    if spares:
        launcher: Any = fit.strategy.launcher
        launcher.procs[:] = [Alive() for _ in range(size - 1)]
        launcher.waiting[:] = [Alive(1 if kind == "dead spare" else None) for _ in range(spares)]
    module = Net(kind == "uncaptured")
    if lost:
        losing.in_data(fit, loader)
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if kind == "validates":
                fit.validate(module, loader)
            fit.fit(module, loader, DataLoader(data, batch_size=4))
        except Exception as error:
            print(f"rank {fit.global_rank} says: {type(error).__name__}: {error}", flush=True)
            raise
    return {
        "values": values(module),
        "losses": record.losses[-1:],
        "steps": fit.global_step,
        "rate": fit.optimizers[0].param_groups[0]["lr"],
        "score": save.best_model_score,
        "files": sorted(path.name for path in (folder / "saved").iterdir()),
        "told": [str(each.message) for each in told if "[PIPER-W033]" in str(each.message)],
    }
