"""Repeated blocks are noted once: the graph is the graph of a run that notes every block, or that run makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lightning_piper as piper
from lightning_piper import cache
from lightning_piper.capture import capture
from lightning_piper.capture.graph_cache import cached_graphs, tracing_run
from lightning_piper.capture.steps.settled_trace import TraceArguments
from tests.capture.test_cached_graphs import described

COUNT = 4


@pytest.fixture(autouse=True)
def few_blocks_are_enough(monkeypatch):
    monkeypatch.setattr(tracing_run, "FEWEST", COUNT)


class Kept(dict[str, Any]):
    """A dict of the step that a block gets itself. Of a plain dict, a block that runs alone would get a copy."""


class Block(nn.Module):
    """A layer of a Transformer. `change` gets the layer, its input and result, and a dict of the step."""

    def __init__(self, index: int, change: Callable[[Block, Tensor, Tensor, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(8), nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.ones(8))
        self.index, self.factor, self.change = index, 2.0, change

    def forward(self, x: Tensor, kept: dict[str, Tensor], mask: Tensor) -> Any:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)
        return self.change(self, x, y + self.down(F.gelu(self.up(y))) * self.factor, kept)


class Net(L.LightningModule):
    def __init__(
        self, change: Callable[[Block, Tensor, Tensor, dict[str, Tensor]], Any], **options: Any
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(Block(i, change) for i in range(COUNT))
        self.options = options
        self.register_buffer("own", torch.ones(8))
        for block in self.layers:
            object.__setattr__(block, "net", self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, inputs, kept = self.embed(batch), [], self.options.get("kept", Kept)()
        mask = torch.zeros(batch.shape[1], batch.shape[1])
        for i, layer in enumerate(self.layers):
            inputs.append(x)
            with piper.annotate("PP", 2 * i // COUNT), self.options.get("mode", nullcontext)():
                x = layer(x, kept, mask=mask)
            x = x[0] if isinstance(x, tuple) else x
        if self.options.get("skip"):
            x = x + inputs[1]
        loss = F.mse_loss(self.head(x), batch)
        if self.options.get("penalty"):
            (gradient,) = torch.autograd.grad(x.sum(), inputs[0], retain_graph=True)
            loss = loss + gradient.square().sum()
        if self.options.get("counts"):
            loss = loss * len(kept)
        if self.options.get("decay"):
            loss = loss + self.layers[1].up.weight.square().sum()
        self.log("largest", x.max())
        return loss

    validation_step = training_step


def runs(
    module: L.LightningModule, monkeypatch, tmp_path, name: str = "training_step"
) -> tuple[list[str], list[str], bool]:
    """Return the graph of the step, the graph of a run that notes every block, and whether the first run
    repeated blocks."""
    blocks: list[int] = []
    own = cached_graphs.log_operations

    def log(*args: Any) -> Any:
        made = own(*args)
        blocks.append(len(args[3]))
        return made

    monkeypatch.setattr(cached_graphs, "log_operations", log)
    monkeypatch.setattr(module, "training_step", getattr(module, name), raising=False)
    found = []
    for again in (False, True):
        monkeypatch.setenv(cache.CACHE, str(tmp_path / str(again)))
        cached_graphs.forget()
        if again:
            cached_graphs._differing.add(module)
        found.append(described(capture(module, torch.ones(2, 3, 4))._trace(TraceArguments(2))[0].graph))
    assert blocks[-1] == 0
    return found[0], found[1], blocks[0] > 0


def plain(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return y


def drawn(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return F.dropout(y, 0.3) * block.scale.sum()


def made_inside(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(3, 1)
    total += torch.arange(3)[:, None]  # changes only memory of the block
    return y * total + torch.zeros_like(y) + x.shape[-1] * (block.index >= 0)


def kept_inside(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    kept["y"] = y
    return kept.pop("y") * 2.0


SAME = {
    "plain": plain,
    "drawn": drawn,
    "made inside": made_inside,
    "kept inside": kept_inside,
    "constants": lambda block, x, y, kept: y.pow(2).mean(-1, keepdim=True) * torch.tensor([1.0] * 8),
    "checkpoint": lambda block, x, y, kept: checkpoint(torch.sin, y, use_reentrant=False),
}


@pytest.mark.parametrize("kind", SAME)
def test_repeated_blocks_are_noted_once(kind, monkeypatch, tmp_path):
    repeated, noted, once = runs(Net(SAME[kind]), monkeypatch, tmp_path)
    assert repeated == noted
    assert once


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Same(torch.autograd.Function):
    """A function that returns its argument. C++ code makes a view of it, outside of any call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def third(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return y * 2 if block.index == 2 else y


def first_stays(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return y + kept.setdefault("y", y).detach()


def earlier(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    before, kept["y"] = kept.get("y", y), y
    return y + before


def shifted(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    return y + block.net.own


def without_gradient(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        z = y * 2
    return y + z


def caught(block: Block, x: Tensor, y: Tensor, kept: dict[str, Tensor]) -> Tensor:
    try:
        return y * block.net.own
    except Exception:
        return y


OTHERS = {
    "a number": third,
    "the first block's result": first_stays,
    "the result of the block before": earlier,
    "a tensor of the module": shifted,
    "a state of torch": without_gradient,
    "a tensor that then needs no gradient": lambda block, x, y, kept: (y.detach_(), x * 2)[1],
    "a caught error": caught,
    "a view of its input": lambda block, x, y, kept: x[:],
    "its input": lambda block, x, y, kept: x,
    "two results": lambda block, x, y, kept: (y, y * 2),
    "a function with its own gradient": lambda block, x, y, kept: Twice.apply(y),
    "such a function of an input": lambda block, x, y, kept: y + Same.apply(x),
    "such a function in one block": lambda block, x, y, kept: Same.apply(y) if block.index == 2 else y,
    "a hook of a tensor": lambda block, x, y, kept: (y.register_hook(lambda g: g * 2), y)[1],
    "a property of the graph": lambda block, x, y, kept: y * (2.0 if x.is_leaf else 3.0),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_blocks_that_are_not_functions_of_their_tensors_are_noted_each(kind, monkeypatch, tmp_path):
    repeated, noted, once = runs(Net(OTHERS[kind]), monkeypatch, tmp_path)
    assert repeated == noted
    assert not once


def differs_in_eps(net: Net) -> None:
    net.layers[2].norm.eps = 0.5


def differs_in_an_attribute(net: Net) -> None:
    net.layers[3].factor = 3.0


def differs_in_a_closure(net: Net) -> None:
    net.layers[1].change = lambda block, x, y, kept: y + 1


def differs_in_a_hook(net: Net) -> None:
    net.layers[1].register_forward_hook(lambda module, args, made: made * 2)


def differs_in_a_hook_of_a_part(net: Net) -> None:
    net.layers[2].up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def has_a_backward_hook(net: Net) -> None:
    net.layers[1].register_full_backward_hook(
        lambda module, grads, given: tuple(g if g is None else g * 2 for g in grads)
    )


def shares_a_parameter(net: Net) -> None:
    net.layers[1].up.weight = net.layers[0].up.weight


def shares_a_layer(net: Net) -> None:
    net.layers[1].up = net.layers[0].up


@pytest.mark.parametrize("change", [
    differs_in_eps, differs_in_an_attribute, differs_in_a_closure, differs_in_a_hook, differs_in_a_hook_of_a_part,
    has_a_backward_hook,
])  # fmt: skip
def test_blocks_that_differ_are_noted_each(change, monkeypatch, tmp_path):
    net = Net(plain)
    change(net)
    repeated, noted, once = runs(net, monkeypatch, tmp_path)
    assert repeated == noted
    assert not once


@pytest.mark.parametrize("change", [shares_a_parameter, shares_a_layer])
def test_blocks_with_shared_parameters_have_the_graph_of_a_plain_run(change, monkeypatch, tmp_path):
    net = Net(plain)
    change(net)
    repeated, noted, _ = runs(net, monkeypatch, tmp_path)
    assert repeated == noted


@pytest.mark.parametrize("option", ["skip", "decay"])
def test_tensors_of_blocks_that_other_code_reads(option, monkeypatch, tmp_path):
    """The gradients of such a tensor would be added in another order."""
    repeated, noted, once = runs(Net(plain, **{option: True}), monkeypatch, tmp_path)
    assert repeated == noted
    assert not once


class Functions(TorchFunctionMode):
    """Multiplies the results of `F.gelu` in each block by another number."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Functions.made += 1
        self.factor = Functions.made % COUNT + 1.0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * self.factor if function is F.gelu else made


class Operations(TorchDispatchMode):
    """Doubles the results of `aten.gelu`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 2 if function is torch.ops.aten.gelu.default else made


def counted(block: Block, x: Tensor, y: Tensor, kept: dict[str, Any]) -> Tensor:
    kept[str(block.index)] = block.index
    return y


def with_attribute(block: Block, x: Tensor, y: Tensor, kept: dict[str, Any]) -> Tensor:
    depth = getattr(x, "depth", 1)
    y = y * depth
    y.depth = depth + 1  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize(("change", "options"), [
    (counted, {"kept": dict, "counts": True}),  # the first block would change a copy
    (with_attribute, {}),
    (plain, {"mode": Functions}),
    (plain, {"mode": Operations}),
    (plain, {"penalty": True}),
], ids=["changed dict", "attribute of a tensor", "functions", "operations", "gradients in the step"])  # fmt: skip
def test_blocks_that_do_more_than_their_calls_show_are_noted_each(change, options, monkeypatch, tmp_path):
    repeated, noted, once = runs(Net(change, **options), monkeypatch, tmp_path)
    assert repeated == noted
    assert not once


class Wide(nn.Module):
    """A layer with its own width, so that each layer is the first of its kind. It reads its two inputs three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width + 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x * y.sigmoid() + x.tanh())


class Pyramid(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide(4 + i) for i in range(COUNT))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch, batch)
        return batch.square().mean()


def test_a_tensor_that_is_two_inputs_of_a_block(monkeypatch, tmp_path):
    """Its gradients would be added in another order."""
    repeated, noted, once = runs(Pyramid(), monkeypatch, tmp_path)
    assert repeated == noted
    assert not once


def one_of_two(block: Block, x: Tensor, y: Tensor, kept: dict[str, Any]) -> Tensor:
    return (y + 1, y + 2)[block.net.options["which"]]


def test_a_known_graph_is_not_that_of_blocks_that_return_another_result(monkeypatch, tmp_path):
    """The blocks of both steps run the same operations."""
    found = []
    monkeypatch.setenv(cache.CACHE, str(tmp_path))
    for which in (0, 1):
        net = Net(one_of_two, which=which).requires_grad_(False)
        net.head.requires_grad_(True)
        found.append(described(capture(net, torch.ones(2, 3, 4))._trace(TraceArguments(2))[0].graph))
    assert found[0] != found[1]


def test_frozen_and_trained_blocks(monkeypatch, tmp_path):
    """Blocks whose parameters or inputs need no gradients repeat only each other."""
    net = Net(plain)
    net.embed.requires_grad_(False)
    net.layers[0].requires_grad_(False)
    repeated, noted, once = runs(net, monkeypatch, tmp_path)
    assert repeated == noted
    assert once


def test_graphs_can_differ(monkeypatch, tmp_path):
    """What the other tests compare can differ."""
    net, other = Net(plain), Net(plain)
    differs_in_an_attribute(other)
    assert runs(net, monkeypatch, tmp_path)[0] != runs(other, monkeypatch, tmp_path / "other")[0]
