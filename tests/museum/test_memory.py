"""Mistakes of recomputation and offload. docs/museum.md describes each of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_piper as piper
from tests.museum.cases import Case, assert_caught
from tests.strategy.fitting import sharing_captures, trainer
from tests.strategy.models import vectors

CASES = {
    "other_mask_recomputed": Case("second pass draws anew, interpreted", "execution", "gradient .* differs"),
    "random_recomputed": Case("random numbers computed again", "execution", "gradient .* differs"),
    "statistics_twice": Case("second pass changes the buffer", "graph", "has 2 values, but it needs"),
    "logged_again": Case("second pass reports", "graph", "samples 0:2 count 2 times"),
    "recomputed_elsewhere": Case("second pass elsewhere", "graph", "no send and receive bring it to device"),
    "fetched_before_stored": Case(
        "fetches do not wait", "plans", r"fetch %.*was written on stream store, and no event orders the two"
    ),
    "stored_before_computed": Case(
        "stores do not wait", "plans", r"store %.*was written on stream compute, and no event orders the two"
    ),
    "host_memory_reused": Case("room given back too early", "training", "gradient .* differs"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])


class Checkpointed(L.LightningModule):
    """Repeats its forward pass in the backward pass without the state of the random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.block, batch[0], use_reentrant=False, preserve_rng_state=False)
        self.log("kept", (hidden != 0).sum(0).double().square().sum())
        return hidden.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@sharing_captures
def test_a_checkpoint_without_random_state() -> None:
    """The gradient of the bias is twice the number of samples that the dropout keeps. Under a plain Trainer, the
    backward pass has another mask. A capture has one mask for both, because it traces the random operation once.
    """
    found = []
    for strategy in ("auto", piper.PiperStrategy([piper.Place([0]), piper.Split(2)], transport="local")):
        torch.manual_seed(0)
        module = Checkpointed()
        before = module.layer.bias.detach().clone()
        run, _ = trainer(strategy, max_steps=1)
        run.fit(module, vectors())
        counts = (before - module.layer.bias.detach()).div(2)
        found.append((counts.round().square().sum().item(), run.callback_metrics["kept"].item()))
    (plain_gradient, plain_mask), (gradient, mask) = found
    assert plain_gradient != plain_mask
    assert gradient == mask
