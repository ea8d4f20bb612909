"""A rule: placements that an operation takes, and those of what it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.ir.values import Partial, Placement, Replicate, Shard

R, P = Replicate(), Partial()


@dataclass(frozen=True)
class Rule:
    """Placements that an operation takes, and those of what it makes.

    Attributes:
        inputs: of its tensor inputs, in the order of `tensors_of`.
        outputs: of the tensors that it makes; None where it makes none.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]


def tensors_of(node: Node) -> list[Node]:
    """Its tensor inputs, in the order of its arguments, each as often as it stands there."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda x: found.append(x))
    return [x for x in found if isinstance(x.meta.get("val"), torch.Tensor)]


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def made_by(node: Node) -> list[torch.Tensor | None]:
    """The tensors that it makes."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def along_of(shape: Sequence[int], d: int) -> Placement:
    """An operand that is broadcast along a dimension is whole there."""
    return Shard(d) if d >= 0 and shape[d] > 1 else R


def argument(node: Node, index: int, default: Any = None) -> Any:
    """A positional argument, also where it was left out."""
    return node.args[index] if len(node.args) > index else default
