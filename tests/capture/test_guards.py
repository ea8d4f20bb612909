"""Guards: what a step has read in Python, compared before it runs again."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import CapturedStep, capture

BATCH = torch.ones(2, 3, dtype=torch.float64)


class Module(L.LightningModule):
    """Its step is one layer and what `body` makes of its output."""

    def __init__(self, body: Any, **state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        for name, value in state.items():
            setattr(self, name, value)
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(self, self.layer(batch)).mean()


def captured(module: L.LightningModule) -> CapturedStep:
    found = capture(module, BATCH)
    found.at(2)
    return found


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_change_is_seen_whenever_guards_are_first_compared(asked_before: bool) -> None:
    module = Module(lambda self, x: x * self.beta, beta=0.5)
    reads = captured(module).reads
    if asked_before:
        assert reads.hold()
    module.beta = 0.25
    assert not reads.hold()
    module.beta = 0.5
    assert reads.hold()
