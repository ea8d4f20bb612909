"""Trainings whose later steps use other parameters and buffers than the first one, in one process and in
stages on two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET

STAGES = (*piper.schedules.one_f_one_b(stages=2, microbatches=2),)
CASES: dict[str, dict[str, Any]] = {
    "joins in the first stage": {"stage": 0},
    "joins in the last stage": {"stage": 1},
    "joins in the middle of an accumulation": {
        "stage": 1,
        "batch": 3,
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.05,
    },
    "is averaged": {"stage": 1, "averages": True},
}


class Joining(L.LightningModule):
    """A layer of one stage joins after some batches. A buffer of that layer counts what it sees, and nothing
    reads the buffer.
    """

    def __init__(self, stage: int, batch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stage, self.batch = stage, batch
        self.first, self.extra, self.second = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.never = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def stage_of(self, number: int, x: Tensor, part: nn.Module, batch_idx: int) -> Tensor:
        with piper.annotate("PP", number):
            if number == self.stage and (self.current_epoch > 0 or batch_idx >= self.batch):
                self.seen += x.abs().sum()
                x = torch.tanh(self.extra(x))
            return torch.tanh(part(x))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self.stage_of(1, self.stage_of(0, x, self.first, batch_idx), self.second, batch_idx)
        with piper.annotate("PP", 1):
            return F.mse_loss(out, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(case: dict[str, Any], folder: Path, strategy: Any, **options: Any) -> dict[str, Any]:
    """The values that the module and the checkpoints have after each epoch and after the fit."""
    module = Joining(case["stage"], case.get("batch", 99))
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    averages = [EMAWeightAveraging(decay=0.5)] if case.get("averages") else []
    callbacks: list[Callback] = [kept, *averages]
    own = {key: case[key] for key in ("accumulate_grad_batches", "gradient_clip_val") if key in case}
    quiet = {key: value for key, value in QUIET.items() if key != "enable_checkpointing"}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, strategy=strategy, callbacks=callbacks, **quiet, **own, **options
    )
    resumed = folder / "epoch=1.ckpt"
    trainer.fit(
        module,
        DataLoader(TensorDataset(data, data.sin()), batch_size=8),
        ckpt_path=str(resumed) if resumed.exists() else None,
    )
    trainer.save_checkpoint(folder / "last.ckpt")
    saved = {name: torch.load(folder / f"{name}.ckpt", weights_only=False) for name in ("epoch=1", "last")}
    return {
        "module": {n: x.clone() for n, x in module.state_dict().items()},
        **{n: x["state_dict"] for n, x in saved.items()},
    }


def train(rank: int, folder: Path) -> dict[str, Any]:
    """Run each case, and run it again from its checkpoint after the second epoch."""
    found = {}
    for name, case in CASES.items():
        for _ in range(2):
            found.setdefault(name, []).append(
                fit(case, folder / name, piper.PiperStrategy(list(STAGES), timeout=PATIENCE), devices=2)
            )
    return found
