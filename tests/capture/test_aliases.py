"""Parameters and buffers in the same memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_piper.capture import capture
from lightning_piper.capture.steps.aliases import sharing_memory
from lightning_piper.errors import CaptureError
from tests.models import MLP

BATCH = torch.ones(4, 4), torch.ones(4, 2)


class Net(MLP):
    """A module with a third layer of the first layer's shape, and two buffers. The step adds to `total`."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 6)
        self.register_buffer("table", torch.ones(6, 4))
        self.register_buffer("total", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total.add_(1)
        return super().training_step(batch, batch_idx) + self.third(batch[0] @ self.table.T[:, :4]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.third(batch[0] + self.table[0])


def share(change: Callable[[Net], Any], freeze: str = "") -> Net:
    module = Net()
    if freeze:
        module.get_parameter(freeze).requires_grad_(False)
    with torch.no_grad():
        change(module)
    return module


def data(module: Net) -> None:
    module.third.weight.data = module.first.weight.data


def part(module: Net) -> None:
    module.third.bias = nn.Parameter(module.first.weight.detach().view(-1)[18:])


def table(module: Net) -> None:
    module.table = module.first.weight.data


def totals(module: Net) -> None:
    module.register_buffer("other", module.total[1:])


@pytest.mark.parametrize(
    ("change", "freeze", "says"),
    [
        (
            data,
            "",
            r"'first.weight' and 'third.weight' are two tensors .* one Parameter under both names: "
            r"self.third.weight = self.first.weight",
        ),
        (
            data,
            "third.weight",
            "the parameters 'first.weight' and 'third.weight' are two tensors that share memory",
        ),
        (
            part,
            "",
            r"'first.weight' and 'third.bias' are two tensors .* self.third.bias.data = self.third.bias.data.clone\(\)",
        ),
        (
            table,
            "",
            r"the buffer 'table' shares memory with the parameter 'first.weight', .* and read "
            r"self.first.weight.detach\(\)",
        ),
        (totals, "", "the step changes the buffer 'total', which shares memory with the buffer 'other'"),
    ],
)
def test_tensors_that_would_come_apart_are_refused(
    change: Callable[[Net], Any], freeze: str, says: str
) -> None:
    module = share(change, freeze)
    step = capture(module, BATCH)
    with pytest.raises(CaptureError, match=says):
        step.at(4)
    if change is not totals:
        capture(module, BATCH, name="validation_step").at(4)  # changes nothing


def constants(module: Net) -> None:
    """Add tensors that share memory: buffers that are views, a repeated and an empty buffer, tied weights,
    and parameters that are parts of one tensor.
    """
    module.register_buffer("row", module.table[0])
    module.register_buffer("same", module.table.view(4, 6))
    module.register_buffer("bytes", module.table.view(torch.uint8))
    module.register_buffer("repeated", torch.ones(1).expand(6))
    module.register_buffer("none", module.first.weight.data[:0])
    module.third.weight = module.first.weight
    both = torch.ones(12, 8)
    module.rows = nn.ParameterList([both[:6, :4], both[6:, :4], both[:, 4:]])


def frozen(module: Net) -> None:
    module.table = module.first.weight.data


@pytest.mark.parametrize(
    ("change", "freeze"), [(constants, ""), (frozen, "first.weight"), (lambda module: module.to("meta"), "")]
)
def test_others_are_not(change: Callable[[Net], Any], freeze: str) -> None:
    capture(share(change, freeze), BATCH).at(4)


class Stack(LightningModule):
    """Two layers in a list, whose weights share memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
        self.layers[1].weight.data = self.layers[0].weight.data[:width]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()


@pytest.mark.parametrize("width, fix", [
    (4, "To tie them, register one Parameter under both names: self.layers[1].weight = self.layers[0].weight"),
    (2, "Give one of them its own memory: self.layers[1].weight.data = self.layers[1].weight.data.clone()"),
])  # fmt: skip
def test_the_fix_is_code(width: int, fix: str) -> None:
    module, batch = Stack(width), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=re.escape(fix)):
        capture(module, batch).at(2)
    exec(fix.partition(": ")[2], {"self": module})
    capture(module, batch).at(2)


def test_recurrent_layers_lie_apart() -> None:
    assert sharing_memory(dict(nn.LSTM(3, 4, num_layers=2).named_parameters())) == []
    flat = torch.zeros(10)
    assert sharing_memory({"b": flat[5:], "a": flat[:6], "c": flat[:5]}) == [("b", "a"), ("a", "c")]
