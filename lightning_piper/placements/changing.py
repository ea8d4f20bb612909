"""`CHANGE`: the operation that stands in a joint graph where a value gets another placement.

It is no work of the pass around it: the graph is cut there, and a node of the training DAG does what it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.ir.division import Change
from lightning_piper.ir.values import Partial, Placement, Replicate, Shard

FOLLOWS = "piper_follows"  # in the metadata of a node: it is done where what it reads is made
AFTER = "piper_after"  # in the metadata of a node: nodes, with how many regions it is behind them, in the order of passes
PLACEMENTS = "piper_placements"  # in the metadata of a node that is one tensor: `Output.held`


@torch.library.custom_op("lightning_piper::change", mutates_args=())
def _change(x: torch.Tensor, axis: str, before: str, after: str) -> torch.Tensor:
    """Run by itself, an identity."""
    return x.clone()


@_change.register_fake
def _(x: torch.Tensor, axis: str, before: str, after: str) -> torch.Tensor:
    return torch.empty_like(x)


CHANGE = torch.ops.lightning_piper.change.default


def change_of(node: Node) -> Change | None:
    """What a change does; None of another node."""
    if node.target is not CHANGE:
        return None
    _, axis, before, after = node.args
    return Change(str(axis), parsed(str(before)), parsed(str(after)))


def changes_of(node: Node) -> tuple[Change, ...]:
    """Changes in a row, of which this is the last one."""
    found: list[Change] = []
    while (change := change_of(node)) is not None:
        found.append(change)
        node = node.all_input_nodes[0]
    return tuple(reversed(found))


def unchanged(node: Node) -> Node:
    """What is changed, of changes in a row."""
    while node.target is CHANGE:
        node = node.all_input_nodes[0]
    return node


def parsed(text: str) -> Placement:
    """The placement that is written so."""
    if text.startswith("S("):
        part, _, turn = text.partition("+")
        return replace(Shard(*map(int, part[2:-1].split(","))), turn=int(turn or 0))
    return Replicate() if text == "R" else Partial()


class Held(dict[Node, Any]):
    """What members of an axis hold of values: of one that is several tensors, a tuple with what they hold of each. All of it where
    nothing is said."""

    def __missing__(self, node: Node) -> Placement:
        return Replicate()


def part_shape(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """Of what one of `degree` members holds."""
    if not isinstance(placement, Shard):
        return shape
    return tuple(size // degree if d == placement.dim else size for d, size in enumerate(shape))
