"""The trial finds steps that compute something else on parts of a batch, and only these."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn

from lightning_piper.capture import capture
from lightning_piper.verify.trial import Difference, tried

BATCH = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Scaled(L.LightningModule):
    """A layer, and a factor that Python computes from the hidden values."""

    def __init__(self, factor: Callable[[Tensor], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(3, 2).double(), factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.layer(batch)
        return (h * self.factor(h)).mean()


def found(factor: Callable[[Tensor], float]) -> Difference | None:
    module = Scaled(factor)
    step = capture(module, BATCH)
    tensors = {step.canonical[name]: x.detach() for name, x in module.named_parameters()}
    return tried(step, tensors, [BATCH], size=2)


def test_a_step_that_reads_the_number_of_samples_differs() -> None:
    assert "mul at" in str(found(lambda h: math.log(len(h))))


def test_a_step_that_computes_something_else_each_time_is_not_tried(tmp_path: Path) -> None:
    """The number of samples is not the cause."""
    runs = tmp_path / "runs"

    def counted(h: Tensor) -> float:
        with runs.open("a") as file:
            file.write("x")
        return float(runs.stat().st_size)

    assert found(counted) is None
    assert runs.stat().st_size > 4  # a trace, and the runs on all samples, on each half and on all again
