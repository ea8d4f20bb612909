"""Gradients that are elsewhere: visible, and an error for whoever looks into them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.gradients import mark
from lightning_piper.holdings.placeholders import stand_in


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
def test_gradients_of_pieces_are_zeroed_with_the_parameter(set_to_none):
    """At once: a hook may do so between the backward pass and the optimizer's step."""
    layer, piece = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    layer.weight = stand_in(nn.Parameter(torch.empty(2, 3, device="meta")), "weight", sharded=True)
    mark({"weight": layer.weight}, {"weight": piece})
    piece.grad = torch.ones(4)
    mark({"weight": layer.weight}, {"weight": piece})
    assert torch.equal(piece.grad, torch.ones(4))
    layer.zero_grad(set_to_none)
    assert piece.grad is None if set_to_none else torch.equal(piece.grad, torch.zeros(4))
    assert (layer.weight.grad is None) == set_to_none


def test_gradients_in_pieces_cannot_be_replaced():
    weight = stand_in(nn.Parameter(torch.empty(2, 3, device="meta")), "weight", sharded=True)
    with pytest.raises(piper.PiperError, match="the gradient of 'weight' is in pieces in each process, and cannot be replaced"):
        weight.grad = torch.zeros_like(weight)
