"""`CHANGE`: the operation in a joint graph that changes the placement of a value.

It does not run in a pass: the graph is cut there, and a node of the training DAG makes the change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.ir.division import Change
from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded

FOLLOWS = "piper_follows"  # metadata key. A node that has it belongs to the region that makes its input.
# Metadata key for a dict: earlier node -> by how many regions, at least, this node comes after the earlier
# node, in the order in which passes run.
AFTER = "piper_after"
# Metadata key of a node that is one tensor: pairs (axis, placement), without axes of whole values.
PLACEMENTS = "piper_placements"


@torch.library.custom_op("lightning_piper::change", mutates_args=())
def _change(x: torch.Tensor, axis: str, before: str, after: str) -> torch.Tensor:
    """Return a copy of `x`. Plans never run this operation, because Piper cuts the graph at it."""
    return x.clone()


@_change.register_fake
def _(x: torch.Tensor, axis: str, before: str, after: str) -> torch.Tensor:
    return torch.empty_like(x)


CHANGE = torch.ops.lightning_piper.change.default


def change_of(node: Node) -> Change | None:
    """Return the change that a node makes, or None if it is not a change."""
    if node.target is not CHANGE:
        return None
    _, axis, before, after = node.args
    return Change(str(axis), parsed(str(before)), parsed(str(after)))


def changes_of(node: Node) -> tuple[Change, ...]:
    """Return the consecutive changes that end with this node, first to last; none if the node is not a
    change."""
    found: list[Change] = []
    while (change := change_of(node)) is not None:
        found.append(change)
        node = node.all_input_nodes[0]
    return tuple(reversed(found))


def unchanged(node: Node) -> Node:
    """Return the value before the consecutive changes that end with `node`; `node` if it is not a change."""
    while node.target is CHANGE:
        node = node.all_input_nodes[0]
    return node


def parsed(text: str) -> Placement:
    """Return the placement whose `str` is `text`."""
    if text.startswith("S("):
        part, _, turn = text.partition("+")
        return replace(Sharded(*map(int, part[2:-1].split(","))), turn=int(turn or 0))
    return Replicated() if text == "R" else Partial()


class PlacementMap(dict[Node, Any]):
    """A mapping from each value to its placement along an axis; `Replicated` for values without an entry.

    The entry of a value that is several tensors is a tuple of placements.
    """

    def __missing__(self, node: Node) -> Placement:
        return Replicated()


def part_shape(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """Return the shape of what one of `degree` members holds of a value: for `S(d)`, dimension `d` is
    `degree` times shorter. For `R` and `P(sum)`, it is `shape`."""
    if not isinstance(placement, Sharded):
        return shape
    return tuple(size // degree if d == placement.dim else size for d, size in enumerate(shape))
