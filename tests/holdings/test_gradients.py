"""Gradients that are elsewhere: visible, and an error for whoever looks into them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.holdings.gradients import Elsewhere, mark


@pytest.fixture
def layer() -> nn.Linear:
    """Its weight is elsewhere, its bias is here."""
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    layer.bias.grad = torch.ones(2)
    mark({"weight": layer.weight}, {})
    return layer


def test_it_looks_like_a_gradient(layer):
    grad = layer.weight.grad
    assert isinstance(grad, Elsewhere) and (grad.shape, grad.dtype) == (layer.weight.shape, torch.float32)
    assert repr(grad) == "<gradient of 'weight', not whole in this process>"
    layer.zero_grad(set_to_none=False)
    assert layer.weight.grad is grad and torch.equal(layer.bias.grad, torch.zeros(2))
    layer.zero_grad()
    assert layer.weight.grad is None


@pytest.mark.parametrize("look", [
    lambda layer: layer.weight.grad.data,
    lambda layer: layer.weight.grad.norm(),
    lambda layer: layer.weight.grad.clamp_(-1, 1),
    lambda layer: [p.grad + 1 for p in layer.parameters()],
    lambda layer: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    lambda layer: torch.stack([p.grad.sum() for p in layer.parameters()]),
])  # fmt: skip
def test_who_looks_into_it_is_told(look, layer):
    with pytest.raises(piper.PiperError, match=r"parameter 'weight': the gradient is not whole.*lightning_piper\.grad_norm"):
        look(layer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_pieces_are_zeroed_with_the_parameter(set_to_none, layer):
    piece = nn.Parameter(torch.ones(4))
    for zeroed in (False, True):
        piece.grad = torch.ones(4)
        if zeroed:
            layer.zero_grad(set_to_none)
        mark({"weight": layer.weight}, {"weight": piece})
        assert (piece.grad is None) == zeroed and isinstance(layer.weight.grad, Elsewhere)
