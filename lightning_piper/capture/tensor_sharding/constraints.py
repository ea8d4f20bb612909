"""Finds the values that a division's `values` shards, among those that regions output to other regions."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.joint.region_assignment import tags_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Shard
from lightning_piper.placements.rule import shape_of


def constraint_lookup(graph: Graph, values: Mapping[str, Shard]) -> Callable[[Node], Shard | None]:
    """Return a function that returns the shard of a value by the first pattern that names its region; None if
    the value is not sharded.

    A value with fewer dimensions than another value of the same pattern is not sharded along its last
    dimension, because it lacks a dimension of positions: tokens [n * length, features] beside [n, length,
    features]. Nor is a dimension of one element sharded, as in masks [n, 1, length, length].
    """
    ranks: dict[str, int] = defaultdict(int)
    for node in graph.nodes if values else ():
        if _is_handed_on(node):
            ranks[label_of(node)] = max(ranks[label_of(node)], len(shape_of(node)))
    most = {
        pattern: max((ranks[label] for label in fnmatch.filter(ranks, pattern)), default=0)
        for pattern in values
    }

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
    """Return the tags of the region that makes a value, as text."""
    return ",".join(f"{tag}={index}" for tag, index in tags_of(node).items()) or "untagged"


def _is_handed_on(node: Node) -> bool:
    """Is the value an activation that the forward pass of another region reads?"""
    value = node.meta.get("val")
    if _torch.is_backward(node) or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    own = tags_of(node)
    return any(tags_of(user) not in ({}, own) for user in node.users if not _torch.is_backward(user))
