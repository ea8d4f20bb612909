"""A logged value that is computed from a buffer which the samples of each part change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper


class Counts(L.LightningModule):
    def __init__(self, count: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 1), count
        self.register_buffer("seen", torch.zeros(()))
        self.values: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = self.layer(x).square().mean()
        self.log("seen", self.count(self, x))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.values.append(self.trainer.callback_metrics["seen"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(module: Any, x: torch.Tensor) -> Any:
    module.seen += len(x)
    return module.seen


def more_than_samples(module: Any, x: torch.Tensor) -> Any:
    module.seen += len(x)
    return module.seen + 1.0


def positive(module: Any, x: torch.Tensor) -> Any:
    module.seen += (x[:, 0] > 0).sum()
    return module.seen * 2


def steps(module: Any, x: torch.Tensor) -> Any:
    module.seen += 1
    return module.seen + len(x)


def logged(count: Callable[[Any, torch.Tensor], Any], strategy: Any) -> tuple[list[float], list[str]]:
    """Return the logged values of three steps, and the warnings."""
    torch.manual_seed(0)
    module = Counts(count)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8))
    return module.values, [str(each.message) for each in found]


def in_microbatches() -> piper.PiperStrategy:
    program = [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
    return piper.PiperStrategy(program, transport="local")


@pytest.mark.parametrize("count", [samples, more_than_samples, positive])
def test_a_count_in_a_buffer_of_microbatches_warns(count: Callable[..., Any]) -> None:
    """The second microbatch reads what the first has added, so no sum of parts is the value of one device."""
    found = logged(count, in_microbatches())[1]
    assert any(
        "self.log('seen')" in text and "not computed from means, sums and ratios" in text for text in found
    )


@pytest.mark.parametrize("count", [samples, steps])
def test_a_count_of_one_part_or_of_steps_is_exact(count: Callable[..., Any]) -> None:
    """The negative control: without microbatches, or with a buffer that all parts change alike."""
    alone = piper.PiperStrategy(transport="local")
    values, found = logged(count, alone if count is samples else in_microbatches())
    assert values == logged(count, "auto")[0]
    assert not any("self.log('seen')" in text for text in found)
