"""A Trainer that fits several times, with its step captured in one fit and uncaptured in another: nothing is
left of the values that an earlier fit logged with other arguments of `self.log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

import lightning_piper as piper
from lightning_piper.strategy import _lightning
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET, distance, values
from tests.strategy.models import vectors

WAYS = {
    "as it is": ("never", "never"),
    "captured later": ("never", "auto"),
    "captured first": ("auto", "never"),
}


PROGRAMS = ("ddp", "zero1", "zero3")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeping(Net):
    """Its fits use one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.kept


def fits(strategy: Any, captures: Sequence[str], cls: type[Net] = Net) -> dict[str, Any]:
    torch.manual_seed(0)
    module = cls()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=0, precision="64-true", **QUIET
    )
    logged = []
    for capture in captures:
        strategy._capture = capture
        trainer.fit_loop.max_epochs += 1  # type: ignore[operator]
        trainer.fit(module, vectors(batch_size=4))
        logged.append(trainer.callback_metrics["loss"])
    return {**values(module), "logged": torch.stack(logged)}


def train(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ddp": fits(DDPStrategy(process_group_backend="gloo"), ("", ""))}
    for way, captures in WAYS.items():
        for forgets in (True, False):
            try:
                with nullcontext() if forgets else mock.patch.object(_lightning, "forget_logs"):
                    found[way, forgets] = fits(piper.PiperStrategy(), captures)
            except Exception as error:
                found[way, forgets] = f"{type(error).__name__}: {error}"
    for program in PROGRAMS:
        for cls in (Net, Keeping):
            try:
                found[program, cls] = fits(piper.PiperStrategy(program), ("auto", "auto"), cls)
            except piper.PiperError as error:
                found[program, cls] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("again")
    return launch_trainings(2, train, folder)


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_are_those_of_ddp(way: str, ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert distance(rank[way, True], rank["ddp"]) < 1e-12
        assert "with different arguments" in rank[way, False]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_optimizer_that_has_been_distributed_is_not_used_again(
    program: str, ranks: list[dict[Any, Any]]
) -> None:
    """It would train nothing, because its parameters are the shards of the earlier fit."""
    for rank in ranks:
        assert distance(rank[program, Net], rank["ddp"]) < 1e-12
        if program == "ddp":
            assert distance(rank[program, Keeping], rank["ddp"]) < 1e-12
        else:
            assert "this SGD was used in an earlier fit" in rank[program, Keeping]
            assert "create a new optimizer for each fit [PIPER-S004]" in rank[program, Keeping]
