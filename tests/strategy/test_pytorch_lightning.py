"""The same strategy under the Trainer of the package `pytorch_lightning`, which has other classes with the
same names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.common.lightning_packages import is_a, is_exactly
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import distance

PACKAGES = [lightning.pytorch, pytorch_lightning]
PROGRAMS = {
    "PP2": piper.schedules.gpipe(stages=2, microbatches=2),
    "ZeRO-3": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ],
}


def module_of(package: Any) -> Any:
    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with piper.annotate("PP"):
                hidden = torch.tanh(self.first(batch[0]))
            with piper.annotate("PP"):
                loss = nn.functional.mse_loss(self.second(hidden), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with piper.annotate("PP"):
                hidden = torch.tanh(self.first(batch[0]))
            with piper.annotate("PP"):
                self.log("val", nn.functional.mse_loss(self.second(hidden), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    return Net()


def fit(package: Any, strategy: Any, folder: Path, devices: int = 1, **options: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    data = DataLoader(
        TensorDataset(torch.randn(24, 4, generator=draw), torch.randn(24, 2, generator=draw)), batch_size=8
    )
    module = module_of(package)
    callbacks = [
        package.callbacks.ModelCheckpoint(folder, monitor="val", save_last=True),
        package.callbacks.LearningRateMonitor(),
        package.callbacks.EMAWeightAveraging(decay=0.6),
    ]
    trainer = package.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=0.1,
        callbacks=callbacks,
        logger=package.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, data, data)
    resumed = torch.load(folder / "last.ckpt", weights_only=True)
    return {
        "values": {name: x.detach().clone() for name, x in module.state_dict().items()},
        "saved": resumed["state_dict"],
        "seen": {name: x.item() for name, x in trainer.callback_metrics.items()},
    }


def train(rank: int, folder: Path) -> dict[str, Any]:
    strategies = {name: partial(piper.PiperStrategy, program) for name, program in PROGRAMS.items()} | {
        "by name": lambda: "piper"
    }
    return {
        f"{name}, {package.__name__}": fit(
            package, strategy(), folder / f"{name} {package.__name__}", devices=2
        )
        for name, strategy in strategies.items()
        for package in PACKAGES
    }


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_trains_as_a_plain_trainer_and_as_under_the_other(tmp_path: Path, precision: Any) -> None:
    found = [
        fit(
            package,
            piper.PiperStrategy(PROGRAMS["PP2"], transport="local"),
            tmp_path / str(i),
            precision=precision,
        )
        for i, package in enumerate(PACKAGES)
    ]
    assert distance(found[0]["values"], found[1]["values"]) == 0 and found[0]["seen"] == found[1]["seen"]
    assert distance(found[1]["saved"], found[1]["values"]) == 0
    plain = fit(pytorch_lightning, "auto", tmp_path / "plain", precision=precision)
    near = {"32-true": 1e-6, "64-true": 1e-14, "bf16-mixed": 2e-3}[
        precision
    ]  # measured: 1.3e-7, 1.2e-16, 1.9e-4
    assert (
        distance(plain["values"], found[1]["values"])
        < near
        < distance(plain["values"], module_of(pytorch_lightning).state_dict())
    )


@pytest.mark.long
def test_trains_over_processes(tmp_path: Path) -> None:
    for rank in launch_trainings(2, train, tmp_path / "run", tmp_path):
        for name in (*PROGRAMS, "by name"):
            one, other = (rank[f"{name}, {package.__name__}"] for package in PACKAGES)
            assert distance(one["values"], other["values"]) == 0 and one["seen"] == other["seen"]
            assert distance(one["values"], module_of(pytorch_lightning).state_dict()) > 0.01
            # Both processes draw the same batches here, so without directives, too, all is as on one device.
            assert distance(one["values"], rank["ZeRO-3, pytorch_lightning"]["values"]) < 1e-6


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_has_a_name_in_both(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(
        package.Trainer(strategy="piper", accelerator="cpu", devices=2, logger=False).strategy,
        piper.PiperStrategy,
    )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_what_is_refused_is_refused_in_both(package: Any, tmp_path: Path) -> None:
    trainer = package.Trainer(
        strategy=piper.PiperStrategy(PROGRAMS["PP2"], transport="local"),
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        callbacks=[package.callbacks.StochasticWeightAveraging(0.1)],
    )
    module = module_of(package)
    module.norm = torch.nn.BatchNorm1d(2)
    with pytest.raises(piper.PiperError, match="StochasticWeightAveraging of a module with batch norms"):
        trainer.fit(module, [(torch.ones(4, 4), torch.ones(4, 2))])


def test_classes_are_told_apart_by_their_names() -> None:
    kinds: list[ModuleType] = [lightning.pytorch.callbacks, pytorch_lightning.callbacks]
    for asked in kinds:
        for given in kinds:
            assert is_a(given.LearningRateFinder(), asked.Callback) and is_exactly(given.Timer(), asked.Timer)
            assert not is_a(given.Timer(), asked.ModelCheckpoint) and not is_exactly(
                given.LearningRateFinder(), asked.Callback
            )
    assert not is_a(object(), lightning.pytorch.Callback)
