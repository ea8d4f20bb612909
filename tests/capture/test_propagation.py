"""Placements in a graph whose layers repeat: equal operations share a rule, and a layer that differs has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_piper.capture import capture
from lightning_piper.capture.tensor_sharding import propagation
from lightning_piper.capture.tensor_sharding.propagation import Propagation, propagate_placements
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Sharded
from lightning_piper.placements.local_graph import localize
from lightning_piper.placements.rule import operation_key

aten = torch.ops.aten


class Layers(L.LightningModule):
    """Residual layers of two products with these inner widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in widths
        )

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()


def placements(widths: Sequence[int], sharded: Sequence[int]) -> list[tuple[str, str]]:
    """Return each operation of the step with its placement, if two ranks shard these layers."""
    params = {f"layers.{i}.0.weight": Sharded(0) for i in sharded}
    params |= {f"layers.{i}.2.weight": Sharded(1) for i in sharded}
    graph, names = capture(Layers(widths), torch.rand(4, 8)).joint_graph()
    (found,) = propagate_placements(graph, [Division("tp", 2, params)], names)
    return [(str(node.target), str(found.held[node])) for node in graph.nodes]


def test_a_layer_that_differs_has_its_own_rules(monkeypatch):
    """Layer 1 is whole, and layer 2 is narrower. A rule for each operation gives the same placements."""
    found = placements([16, 16, 12, 16], [0, 2, 3])
    monkeypatch.setattr(Propagation, "_situation", lambda *_: (object(),))
    assert placements([16, 16, 12, 16], [0, 2, 3]) == found
    # If all layers of the same shapes had one rule, the whole layer would have the rules of a sharded one.
    monkeypatch.setattr(Propagation, "_situation", lambda self, node, inputs: operation_key(node, inputs))
    assert placements([16, 16, 12, 16], [0, 2, 3]) != found


def test_repeated_layers_cost_no_choices(monkeypatch):
    chosen: list[Any] = []

    def counting(node: Any, *about: Any) -> Any:
        chosen.append(node)
        return choose(node, *about)

    choose = propagation.choose
    monkeypatch.setattr(propagation, "choose", counting)
    counts = []
    for count in (3, 6):
        placements([16] * count, range(count))
        counts.append(len(chosen))
        chosen.clear()
    assert counts[0] == counts[1] > 0


def test_equal_operations_on_other_strides_have_their_own_values():
    graph = torch.fx.Graph()
    with _torch.FakeTensorMode():
        inputs = [torch.empty_strided((8, 8), stride) for stride in ((8, 1), (8, 1), (1, 8))]
        nodes = []
        for i, value in enumerate(inputs):
            x = graph.placeholder(f"x{i}")
            made = graph.call_function(aten.relu.default, (x,))
            x.meta["val"], made.meta["val"] = value, aten.relu.default(value)
            nodes.append((x, made))
    localize(graph, {node: Sharded(1) for pair in nodes for node in pair}, 2)
    first, second, turned = (made.meta["val"] for _, made in nodes)
    assert first is second and first.shape == turned.shape == (8, 4)
    assert first.stride() != turned.stride()
