"""Which of the values that regions hand on the user divides: what `values` of a division names."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from lightning_piper.capture import _torch
from lightning_piper.capture.regions import tags_of
from lightning_piper.ir.values import Shard
from lightning_piper.placements.rule import shape_of


def pinning(graph: Graph, values: Mapping[str, Shard]) -> Callable[[Node], Shard | None]:
    """A function that gives how a value is divided by what the first pattern that names its region says; None if it is not.

    Of values with fewer dimensions than others that the pattern names, the last one is none of positions: tokens
    [n * length, features] beside [n, length, features]. Nor is one of a single element, as of masks [n, 1, length, length].
    """
    ranks: dict[str, int] = defaultdict(int)
    for node in graph.nodes if values else ():
        if _is_handed_on(node):
            ranks[label_of(node)] = max(ranks[label_of(node)], len(shape_of(node)))
    most = {pattern: max((ranks[label] for label in fnmatch.filter(ranks, pattern)), default=0) for pattern in values}

    def pinned(node: Node) -> Shard | None:
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
    """The tags of the region that a value is made in."""
    return ",".join(f"{tag}={index}" for tag, index in tags_of(node).items()) or "untagged"


def _is_handed_on(node: Node) -> bool:
    """Is it an activation that other regions read on the way forth?"""
    value = node.meta.get("val")
    if _torch.is_backward(node) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    own = tags_of(node)
    return any(tags_of(user) not in ({}, own) for user in node.users if not _torch.is_backward(user))
