"""A scheduler that monitors a value follows a fit that resumes from a checkpoint, as if the fit had not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_piper.strategy import _lightning
from tests.strategy.fitting import local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, vectors

EPOCHS = 4
SAVES: dict[str, dict[str, Any]] = {
    "in an epoch": {"every_n_train_steps": 2},
    "after a validation in an epoch": {"save_on_train_epoch_end": False},
    "after the validation of an epoch": {"save_on_train_epoch_end": False},
    "at the end of an epoch": {"save_on_train_epoch_end": True},
}


class Plateau(MLP):
    """Halves its learning rate in every second epoch, because its monitored value never improves enough."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.second(self.first(batch[0])).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=1e9
        )
        config = {"scheduler": scheduler, "monitor": "validated", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


@sharing_captures
def fit(folder: Path, when: str, path: Path | None = None) -> tuple[dict[str, Tensor], float, list[Path]]:
    """Train to the last epoch. Return the weights, the learning rate and the checkpoints from inside of the fit."""
    save = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **SAVES[when])
    often = 2 if when == "after a validation in an epoch" else 1.0
    runs, _ = trainer(
        local(),
        [save],
        max_steps=-1,
        max_epochs=EPOCHS,
        val_check_interval=often,
        enable_checkpointing=True,
    )
    torch.manual_seed(0)
    module = Plateau()
    loader = vectors(16, batch_size=4)
    runs.fit(module, loader, loader, ckpt_path=path)
    found = sorted(folder.glob("*.ckpt"), key=lambda each: int(each.stem.removeprefix("step=")))
    return values(module), runs.optimizers[0].param_groups[0]["lr"], found[:-1]


@pytest.mark.parametrize("when", SAVES)
def test_it_follows_a_fit_that_resumes(when: str, tmp_path: Path) -> None:
    whole, rate, saved = fit(tmp_path, when)
    assert len(saved) > 2
    for path in saved[0::2] if when == "in an epoch" else saved:
        resumed, its_rate, _ = fit(tmp_path / path.stem, when, path)
        assert its_rate == rate and same(resumed, whole), path


@pytest.mark.parametrize("when", list(SAVES)[1:])
def test_lightning_alone_leaves_an_update_out(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rate, saved = fit(tmp_path, when)
    monkeypatch.setattr(_lightning, "continue_monitoring", lambda *given: None)
    rates = [fit(tmp_path / path.stem, when, path)[1] for path in saved]
    assert max(rates) > rate


def test_a_checkpoint_without_the_values_resumes_as_in_lightning(tmp_path: Path) -> None:
    _, rate, saved = fit(tmp_path, "at the end of an epoch")
    content = torch.load(saved[1], weights_only=True)
    del content["lightning_piper"]["monitored"]
    torch.save(content, tmp_path / "without.ckpt")
    assert fit(tmp_path / "again", "at the end of an epoch", tmp_path / "without.ckpt")[1] == 2 * rate


def test_a_fit_without_such_a_scheduler_saves_no_values(tmp_path: Path) -> None:
    runs, _ = trainer(local())
    runs.fit(MLP(), vectors())
    runs.save_checkpoint(tmp_path / "a.ckpt")
    assert "monitored" not in torch.load(tmp_path / "a.ckpt", weights_only=True)["lightning_piper"]
