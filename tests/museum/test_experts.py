"""Mistakes of expert parallelism. docs/museum.md describes each of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.errors import DirectiveError
from tests.museum.cases import Case, assert_caught

CASES = {
    "router_unsummed": Case(
        "router not summed", "graph", r"router\.weight.*every replica would step with its own gradient"
    ),
    "averaged_over_owners": Case("mean over owners", "training", "gradient blocks.0.up differs"),
    "owners_unsummed": Case(
        "experts not summed", "graph", r"blocks\.0\.up.*every replica would step with its own gradient"
    ),
    "router_detached": Case(
        "gradients stay at their experts", "graph", "(?i)reads cotangent .*experts.*combine them first"
    ),
    "brought_back_unordered": Case("back without the order of dispatch", "training", "differs"),
    "bias_moves_each_microbatch": Case(
        "running statistics once for each microbatch", "graph", "wait for each other in a circle"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_caught(name: str) -> None:
    assert_caught(CASES[name])


class Injected(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss in the backward pass, and not the loss to the loss. The gradient has
    the same size for each microbatch, whatever the gradient of the loss is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Balanced(L.LightningModule):
    """A router with an auxiliary loss, which the step injects or adds."""

    def __init__(self, injects: bool) -> None:
        super().__init__()
        self.router, self.out, self.injects = nn.Linear(8, 4), nn.Linear(8, 4), injects

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        routed = self.router(batch[0]).softmax(-1)
        auxiliary = 0.1 * routed.square().mean()
        x = Injected.apply(batch[0], auxiliary) if self.injects else batch[0]
        loss = F.mse_loss(self.out(x) * routed, batch[1])
        return loss if self.injects else loss + auxiliary


def test_an_injected_auxiliary_gradient() -> None:
    batch = torch.randn(8, 8), torch.randn(8, 4)
    program = [piper.Place([0]), piper.Split(4)]
    assert piper.verify(Balanced(False), batch, program).verdict == "verified"
    with pytest.raises(DirectiveError, match="the backward pass is not linear in the gradient of the loss"):
        piper.compile(Balanced(True), batch, program)
