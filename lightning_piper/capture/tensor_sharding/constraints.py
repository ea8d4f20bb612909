"""Find the values that `Division.values` shards: some of the values that the forward pass of one region
outputs to another region."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.joint.region_assignment import tags_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Sharded
from lightning_piper.placements.rule import shape_of


def constraint_lookup(graph: Graph, values: Mapping[str, Sharded]) -> Callable[[Node], Sharded | None]:
    """Return a function from a node to the shard of its value, according to the first pattern that matches
    the region of the node.

    The function returns None if the user does not shard the value. This is so if no pattern matches, or if
    the value is not a floating-point activation that the forward pass of another region reads.

    The function also returns None if the value does not have the dimension of the shard, or has one element
    along it, as in masks [n, 1, length, length]. Some values have fewer dimensions than another value of the
    same pattern, such as tokens [n * length, features] beside [n, length, features]. Their positions are
    merged into another dimension, so their last dimension is not the sharded one, and the function returns
    None for a shard of the last dimension.

    Args:
        values: see `Division.values`.
    """
    # text of a region's tags -> the largest number of dimensions of a value that the region outputs
    ranks: dict[str, int] = defaultdict(int)
    for node in graph.nodes if values else ():
        if _is_handed_on(node):
            ranks[label_of(node)] = max(ranks[label_of(node)], len(shape_of(node)))
    # pattern -> the largest number of dimensions in all regions that match it
    most = {
        pattern: max((ranks[label] for label in fnmatch.filter(ranks, pattern)), default=0)
        for pattern in values
    }

    def pinned(node: Node) -> Sharded | None:
        """Return the shard of a value, or None if the user does not shard the value."""
        if not values or not _is_handed_on(node):
            return None
        rank, label = len(shape_of(node)), label_of(node)
        for pattern, part in values.items():
            if fnmatch.fnmatchcase(label, pattern):
                there = part.dim < rank - (rank < most[pattern]) and shape_of(node)[part.dim] > 1
                return part if there else None
        return None

    return pinned


def label_of(node: Node) -> str:
    """Return the tags of the region that computes a value, as text: "PP=0,layer=3", or "untagged"."""
    return ",".join(f"{tag}={index}" for tag, index in tags_of(node).items()) or "untagged"


def _is_handed_on(node: Node) -> bool:
    """Return whether the value is a floating-point activation that the forward pass of another region
    reads."""
    value = node.meta.get("val")
    if _torch.is_backward(node) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    own = tags_of(node)
    return any(tags_of(user) not in ({}, own) for user in node.users if not _torch.is_backward(user))
