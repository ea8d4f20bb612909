"""Replace factors and conditions of denominators in a step that works on parts of the batch.

    loss = total / (count - 1)    --guard-->    loss = total / usable(count - 1), where usable(0) is 1

One device uses the factor and the condition of the whole batch. `Denominator.of` with `part=True` replaces the
same factors, so that the weight of the part fits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.losses.denominators import Conditional, Expression, Factor, guards_of, stats_of
from lightning_piper.capture.torch_private import _torch

aten = torch.ops.aten


def guard_factors(
    graph: Graph,
    denominators: Iterable[Expression],
    uses: Mapping[Factor | Conditional, Collection[tuple[Node, Node]]],
) -> None:
    """On a part of the batch, let the step use 1 instead of a factor that is 0 or not finite, and let the
    conditions of denominators hold. The graph is changed in place.

    Args:
        graph: The graph of the step.
        denominators: The denominators with such factors or conditions.
        uses: See `LossTerms.uses`.
    """
    made: dict[Node, Node] = {}
    for denominator in denominators:
        for stat in stats_of(denominator):
            # The operation of this loss divides by the sum itself, so its result is replaced.
            if stat.how == "labels":
                _guard_loss(graph, stat.node)
        for guard in guards_of(denominator):
            for reader, value in uses.get(guard, ()):
                if value not in made:
                    with graph.inserting_before(value.next):
                        made[value] = _guarded(graph, value)
                for user in [reader, *(x for x in value.users if _torch.is_backward(x))]:
                    user.replace_input_with(value, made[value])


def add_like(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    like: Node,
    kwargs: Mapping[str, Any] | None = None,
) -> Node:
    """Add an operation with the tags of the node `like`. Return its node."""
    made = graph.call_function(target, args, dict(kwargs or {}))
    made.meta = dict(like.meta)
    return made


def _guarded(graph: Graph, value: Node) -> Node:
    """Add nodes that replace a factor by 1 if it is 0 or not finite, and a condition by True. Return the last
    node."""

    def add(target: Any, *args: Any) -> Node:
        node = add_like(graph, target, args, value)
        node.meta["val"] = target(*(x.meta["val"] if isinstance(x, Node) else x for x in args))
        return node

    if value.meta["val"].dtype == torch.bool:
        return add(aten.logical_or.default, value, add(aten.logical_not.default, value))
    size = add(aten.abs.default, value)
    known = add(aten.logical_and.default, add(aten.gt.Scalar, size, 0), add(aten.lt.Scalar, size, math.inf))
    return add(aten.masked_fill.Scalar, value, add(aten.logical_not.default, known), 1)


def _guard_loss(graph: Graph, loss: Node) -> None:
    """Let a loss over labels be 0 instead of 0 / 0 if no label counts. `loss` is the operation: its results
    are the loss, and the weight of the labels that count."""
    for value in [x for x in loss.users if x.args[1] == 0]:
        with graph.inserting_before(value.next):
            counts = add_like(graph, operator.getitem, (loss, 1), value)
            empty = add_like(graph, aten.eq.Scalar, (counts, 0), value)
            zero = add_like(graph, aten.zeros_like.default, (value,), value)
            guarded = add_like(graph, aten.where.self, (empty, zero, value), value)
        for user in [x for x in value.users if x not in (zero, guarded)]:
            user.replace_input_with(value, guarded)
