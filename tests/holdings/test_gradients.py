"""Gradients that another process holds: they look like gradients, and reading their values raises an error."""

from __future__ import annotations

import itertools

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.holdings.gradient_injection import GradientInjection
from lightning_piper.holdings.gradients import _routes, changed_by, mark
from lightning_piper.holdings.placeholders import stand_in
from lightning_piper.holdings.remote_gradient import RemoteGradient
from lightning_piper.holdings.tensor_map import HolderGroup, TensorMap
from lightning_piper.ir.values import Kind
from lightning_piper.processes.world import World


@pytest.fixture
def layer() -> nn.Linear:
    """A layer whose weight is in another process and whose bias is in this one."""
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    layer.bias.grad = torch.ones(2)
    mark({"weight": layer.weight}, {})
    return layer


def in_pieces() -> tuple[nn.Linear, nn.Parameter]:
    """A layer whose weight is sharded, and the parameter for this process's shard of it."""
    layer, piece = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    layer.weight = stand_in(
        nn.Parameter(torch.empty(2, 3, device="meta")), "weight", sharded=True, device=torch.device("cpu")
    )
    return layer, piece


def test_it_looks_like_a_gradient(layer):
    grad = layer.weight.grad
    assert isinstance(grad, RemoteGradient) and (grad.shape, grad.dtype) == (
        layer.weight.shape,
        torch.float32,
    )
    assert repr(grad) == "<gradient of 'weight', not available in this process>"
    layer.zero_grad(set_to_none=False)
    assert layer.weight.grad is grad and torch.equal(layer.bias.grad, torch.zeros(2))
    layer.zero_grad()
    assert layer.weight.grad is None


@pytest.mark.parametrize("look", [
    lambda layer: layer.weight.grad.norm(),
    lambda layer: layer.weight.grad.data.abs(),
    lambda layer: layer.weight.grad.mul_(torch.ones(3)),
    lambda layer: layer.weight.grad.add_(1),
    lambda layer: torch.nan_to_num(layer.weight.grad),
    lambda layer: torch.mul(input=layer.weight.grad, other=2),
    lambda layer: torch.cat(tensors=[layer.weight.grad]),
    lambda layer: torch._foreach_add_(self=[layer.weight.grad], other=[torch.ones(2, 3)]),
    lambda layer: [p.grad + 1 for p in layer.parameters()],
    lambda layer: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    lambda layer: torch.stack([p.grad.sum() for p in layer.parameters()]),
])  # fmt: skip
def test_who_looks_into_it_is_told(look, layer):
    with pytest.raises(
        piper.PiperError,
        match=r"parameter 'weight': this process does not have the whole gradient"
        r".*lightning_piper\.grad_norm",
    ):
        look(layer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_pieces_are_zeroed_with_the_parameter(set_to_none):
    """At once: a hook may do so between the backward pass and the optimizer's step."""
    layer, piece = in_pieces()
    mark({"weight": layer.weight}, {"weight": piece})
    piece.grad = torch.ones(4)
    mark({"weight": layer.weight}, {"weight": piece})
    assert torch.equal(piece.grad, torch.ones(4))
    layer.zero_grad(set_to_none)
    assert piece.grad is None if set_to_none else torch.equal(piece.grad, torch.zeros(4))
    assert (layer.weight.grad is None) == set_to_none


CHANGES = {
    "scaled": lambda grad: grad.mul_(0.5),
    "scaled by a tensor": lambda grad: grad.mul_(torch.tensor(0.5)),
    "divided": lambda grad: grad.data.div_(3),
    "clamped": lambda grad: torch.clamp_(grad.detach(), -1.5, max=1.5),
    "finite": lambda grad: torch.nan_to_num(grad, nan=7.0, out=grad),
    "by keyword": lambda grad: torch.mul(input=grad, other=0.5, out=grad),
    "many by keyword": lambda grad: torch._foreach_mul_(scalar=0.5, self=[grad]),
    "many": lambda grad: torch._foreach_mul_([grad], 0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_each_element_on_its_own_changes_pieces(name):
    layer, piece = in_pieces()
    expected, values = torch.tensor([2.0, -3.0, torch.nan, 0.25]), torch.tensor([2.0, -3.0, torch.nan, 0.25])
    piece.grad = values
    mark({"weight": layer.weight}, {"weight": piece})
    CHANGES[name](layer.weight.grad)
    CHANGES[name](expected)
    assert torch.equal(values.nan_to_num(9), expected.nan_to_num(9)) and piece.grad is values
    assert not torch.equal(values.nan_to_num(9), torch.tensor([2.0, -3.0, 9.0, 0.25]))


def test_by_assignment_and_with_torchs_own_clipping():
    layer, piece = in_pieces()
    piece.grad = torch.tensor([2.0, -3.0, 4.0, 0.25])
    layer.bias.grad = torch.full((2,), 8.0)
    mark({"weight": layer.weight}, {"weight": piece})
    layer.weight.grad *= 0.5
    torch.nn.utils.clip_grad_value_(layer.parameters(), 1.25)
    assert torch.equal(piece.grad, torch.tensor([1.0, -1.25, 1.25, 0.125])) and torch.equal(
        layer.bias.grad, torch.full((2,), 1.25)
    )


def test_nothing_is_changed_of_another_process(layer):
    torch._foreach_mul_([p.grad for p in layer.parameters()], 0.5)
    assert torch.equal(layer.bias.grad, torch.full((2,), 0.5)) and isinstance(
        layer.weight.grad, RemoteGradient
    )


def test_gradients_that_are_kept_back_cannot_be_changed():
    layer, piece = in_pieces()
    mark({"weight": layer.weight}, {"weight": piece})
    with pytest.raises(
        piper.PiperError, match="'weight' cannot be changed in the middle of a gradient accumulation"
    ):
        layer.weight.grad.mul_(2)


@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_of_other_processes_cannot_be_replaced(sharded):
    weight = stand_in(
        nn.Parameter(torch.empty(2, 3, device="meta")), "weight", sharded=sharded, device=torch.device("cpu")
    )
    for value in (torch.zeros(2, 3), *([torch.zeros_like(weight)] if sharded else [])):
        with pytest.raises(
            piper.PiperError, match="the gradient of 'weight' cannot be replaced here, because"
        ):
            weight.grad = value
    weight.grad = None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_that_leaves_keeps_the_zeros_that_zero_grad_leaves(set_to_none):
    """`zero_grad(set_to_none=False)` leaves zeros, with which optimizers go on: momentum, weight decay."""
    layer, piece = in_pieces()
    injection = GradientInjection({"weight": piece}, torch.device("cpu"), {"weight": layer.weight})
    injection.begin()
    injection.loss(torch.tensor(1.0), {"weight": torch.ones(4)}).backward()
    injection.hold({"weight": piece}, {})  # a layout without the parameter
    injection.begin()
    loss = injection.loss(torch.tensor(1.0), {})
    torch.optim.SGD([piece]).zero_grad(set_to_none)
    loss.backward()
    assert piece.grad is None if set_to_none else torch.equal(piece.grad, torch.zeros(4))
    assert isinstance(layer.weight.grad, RemoteGradient) != set_to_none
    torch.optim.SGD([piece]).zero_grad()
    injection.begin()
    injection.loss(torch.tensor(1.0), {}).backward()
    assert layer.weight.grad is None


class Tied(L.LightningModule):
    """Both stages read one layer. The second stage trains it, reads it without a gradient, or neither stage
    trains it.
    """

    def __init__(self, second: str) -> None:
        super().__init__()
        self.first, self.tied, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.second = second
        self.tied.requires_grad_(second != "frozen")

    def training_step(self, batch, batch_idx):
        with piper.annotate("PP", 0):
            h = torch.tanh(self.tied(self.first(batch)))
        with piper.annotate("PP", 1):
            with torch.set_grad_enabled(self.second != "read only"):
                again = self.tied(h)
            return self.last(h + again).square().mean()


def routes(second: str, levels: tuple[int, int]) -> tuple[list, TensorMap]:
    groups = [[0, 2], [1, 3]]
    program = [piper.Place(group, filter={"PP": i}) for i, group in enumerate(groups)]
    program += [piper.Replicate(groups[i], filter={"PP": i}, zero=level) for i, level in enumerate(levels)]
    compiled = piper.compile(Tied(second), torch.randn(8, 8), program)
    tensor_map, world = TensorMap(compiled, 4), World(1, 4, torch.device("cpu"))
    return _routes(changed_by(compiled.dag, Kind.GRAD), tensor_map, world), tensor_map


@pytest.mark.parametrize("second", ["trains", "read only", "frozen"])
def test_holders_of_a_tied_layer_hold_the_same_shards_or_the_program_is_an_error(second):
    """Whatever a stage shards, a stage that only reads the layer gets its shards from the same gather. So no
    process waits for elements of a gradient that no process computes.
    """
    for levels in itertools.product((0, 1, 3), repeat=2):
        if second == "trains" and 0 in levels and any(levels):
            with pytest.raises(
                piper.DirectiveError, match=r"tied\.weight.*sharded in one region and whole in anot"
            ):
                routes(second, levels)
            continue
        found, tensor_map = routes(second, levels)
        assert found == []
        groups = tensor_map.holder_groups["tied.weight"]
        parts = {tuple(group.ranges.values()) for group in groups}
        assert len(parts) == 1 or second == "frozen", (levels, groups)


def test_a_gradient_that_no_process_computes_has_no_route():
    tensor_map, world = TensorMap.__new__(TensorMap), World(0, 3, torch.device("cpu"))
    tensor_map.holder_groups = {"x": (HolderGroup({0: (0, 4), 1: (4, 8)}), HolderGroup({2: (0, 8)}))}
    with pytest.raises(AssertionError, match=r"no process computes elements \(0, 8\) of 'x', which rank 2"):
        _routes({"x": {0, 1}}, tensor_map, world)
    assert _routes({"x": {0, 1, 2}}, tensor_map, world) == []
