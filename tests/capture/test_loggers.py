"""A step that calls a logger or a tracker is not captured, because it would call it only during the capture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError


class Calls(L.LightningModule):
    def __init__(self, call: Callable[[Any, int, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.call, self.part = nn.Linear(3, 1), call, L.LightningModule()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = self.layer(x).square().mean()
        self.call(self, batch_idx, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(module: Any, index: int, loss: torch.Tensor) -> None:
    module.logger.log_metrics({"samples": 4, "index": index}, step=module.global_step)


def values(module: Any, index: int, loss: torch.Tensor) -> None:
    module.logger.log_metrics({"item": loss.item()}, step=module.global_step)


def tensors(module: Any, index: int, loss: torch.Tensor) -> None:
    for logger in module.loggers:
        logger.log_metrics({"tensor": loss.detach()}, step=module.global_step)


def writes(module: Any, index: int, loss: torch.Tensor) -> None:
    module.logger.experiment.log_metrics({"samples": 4}, module.global_step)


def of_submodule(module: Any, index: int, loss: torch.Tensor) -> None:
    module.part.logger.log_metrics({"samples": 4}, step=index)


def reads(module: Any, index: int, loss: torch.Tensor) -> None:
    assert isinstance(module.logger, CSVLogger)
    assert module.logger is module.loggers[0]
    module.log("version", float(module.logger.version))
    module.log("depth", float(len(Path(module.logger.log_dir).parts)))


def lines(call: Callable[..., None], folder: Path, strategy: Any, batch: int = 4) -> list[str]:
    torch.manual_seed(0)
    module = Calls(call).double()
    logger = CSVLogger(folder, name="runs", version=7, flush_logs_every_n_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=logger, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(12, 3, dtype=torch.float64))
    trainer.fit(module, DataLoader(data, batch_size=batch))
    file = Path(logger.log_dir) / "metrics.csv"
    return file.read_text().splitlines()


@pytest.mark.parametrize("call", [numbers, values, tensors, writes, of_submodule])
def test_a_step_that_calls_a_logger_runs_uncaptured(call: Callable[..., None], tmp_path: Path) -> None:
    plain = lines(call, tmp_path / "plain", "auto")
    assert len(plain) == 7  # six steps, and the names
    with pytest.warns(UserWarning, match=r"could not capture .* calls self.trainer.logger"):
        assert lines(call, tmp_path / "piper", piper.PiperStrategy(transport="local")) == plain


def test_a_pipeline_refuses_a_step_that_calls_a_logger(tmp_path: Path) -> None:
    program = [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
    with pytest.raises(piper.CaptureError, match=r"calls self.trainer.logger.log_metrics\(\).*PIPER-C003"):
        lines(numbers, tmp_path, piper.PiperStrategy(program, transport="local"))


def test_a_step_that_reads_from_a_logger_is_captured(tmp_path: Path) -> None:
    """The negative control: the name and the folder of a logger are values like others of the Trainer."""
    plain = lines(reads, tmp_path / "run", "auto")
    assert lines(reads, tmp_path / "run", piper.PiperStrategy(transport="local", capture="always")) == plain


class Run:
    """Like a run of wandb."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def log(self, record: dict[str, float]) -> None:
        self.records.append(record)


def step_that(call: Callable[[], object]) -> Any:
    module = Calls(lambda module, index, loss: None)
    module.call = lambda module, index, loss: call()
    return capture(module, [torch.ones(4, 3)]).at(4)


def test_a_step_that_writes_a_summary_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    with pytest.raises(CaptureError, match=r"calls torch.utils.tensorboard.SummaryWriter.add_scalar\(\)"):
        step_that(lambda: writer.add_scalar("loss", 1.0))
    assert step_that(writer.get_logdir).regions
    writer.add_scalar("loss", 1.0)  # outside of a capture
    writer.close()


def test_a_step_that_sends_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run, wandb, mlflow = Run(), ModuleType("wandb"), ModuleType("mlflow")
    vars(wandb).update(Run=Run, log=run.log, config=SimpleNamespace(rate=1.0))
    vars(mlflow).update(log_metric=lambda name, value: run.records.append(name))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    calls: dict[str, Callable[[], object]] = {
        "wandb.log": lambda: wandb.log({"loss": 1.0}),
        "wandb.Run.log": lambda: run.log({"loss": 1.0}),
        "mlflow.log_metric": lambda: mlflow.log_metric("loss", 1.0),
    }
    for name, call in calls.items():
        with pytest.raises(CaptureError, match=rf"calls {name}\(\).*PIPER-C003"):
            step_that(call)
    assert not run.records
    assert step_that(lambda: wandb.config.rate).regions
    for call in calls.values():  # outside of a capture
        call()
    assert len(run.records) == 3
