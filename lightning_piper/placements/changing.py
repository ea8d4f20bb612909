"""`CHANGE`: the operation that stands in a joint graph where a value gets another placement.

It is no work of the pass around it: the graph is cut there, and a node of the training DAG does what it says.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from lightning_piper.ir.values import Partial, Placement, Replicate, Shard

FOLLOWS = "piper_follows"  # in the metadata of a node: it is done where what it reads is made
PLACEMENT = "piper_placement"  # in the metadata of a node: what members hold of it, or a tuple, for each of its tensors


@torch.library.custom_op("lightning_piper::change", mutates_args=())
def _change(x: torch.Tensor, before: str, after: str) -> torch.Tensor:
    """Run by itself, an identity."""
    return x.clone()


@_change.register_fake
def _(x: torch.Tensor, before: str, after: str) -> torch.Tensor:
    return torch.empty_like(x)


CHANGE = torch.ops.lightning_piper.change.default


def change_of(node: Node) -> tuple[Placement, Placement] | None:
    """The placements before and after, of a change; None of another node."""
    if node.target is not CHANGE:
        return None
    _, before, after = node.args
    return parsed(str(before)), parsed(str(after))


def parsed(text: str) -> Placement:
    """The placement that is written so."""
    if text.startswith("S("):
        return Shard(*map(int, text[2:-1].split(",")))
    return Replicate() if text == "R" else Partial()


def placement_of(node: Node) -> Placement:
    """What members hold of a value that is one tensor."""
    found: Placement = node.meta.get(PLACEMENT, Replicate())
    return found


def part_shape(shape: tuple[int, ...], placement: Placement, degree: int) -> tuple[int, ...]:
    """Of what one of `degree` members holds."""
    if not isinstance(placement, Shard):
        return shape
    return tuple(size // degree if d == placement.dim else size for d, size in enumerate(shape))
