"""Sharding rules: the placements that an operation reads, and the placements of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded

R, P = Replicated(), Partial()


@dataclass(frozen=True)
class Rule:
    """One way to shard an operation: the placements that it reads, and the placements of its outputs.

    Attributes:
        inputs: Placements of the operation's tensor inputs, in the order of `tensors_of`.
        outputs: Placements of the operation's outputs; None for an output that is not a tensor.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]


def tensors_of(node: Node) -> list[Node]:
    """Return a node's tensor inputs in the order of its arguments, with repetitions."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda x: found.append(x))
    return [x for x in found if isinstance(x.meta.get("val"), torch.Tensor)]


def operation_key(node: Node, inputs: Sequence[Node]) -> tuple[object, ...]:
    """Return a key of an operation: equal for two calls that differ only in the values of their tensors.

    Args:
        inputs: `tensors_of(node)`.
    """
    numbers = {x: i for i, x in enumerate(inputs)}
    shapes = tuple((tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in inputs)
    arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: numbers.get(x, x.name))
    return node.target, str(arguments), shapes


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def made_by(node: Node) -> list[torch.Tensor | None]:
    """Return one entry for each output of a node, in order: a fake tensor, or None for an output that the
    operation does not compute."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def along_of(shape: Sequence[int], d: int) -> Placement:
    """Return the placement of an operand whose operation is sharded along the operand's dimension `d`.

    An operand that is broadcast along `d` stays whole: its size is 1 there, or it lacks the dimension
    (`d` < 0).
    """
    return Sharded(d) if d >= 0 and shape[d] > 1 else R


def argument(node: Node, index: int, default: Any = None) -> Any:
    """Return a positional argument of a node, or `default` if the node does not have the argument."""
    return node.args[index] if len(node.args) > index else default
