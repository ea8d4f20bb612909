"""Logged values that no weights put together, but that are computed from values which weights do: the root of a mean, a ratio of
two sums. What they are computed from is put together over the batch, and the rest is computed of that, once for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.code import compile_boxed
from lightning_piper.capture.terms import OTHER, ROWS, Terms
from lightning_piper.ir.regions import Computed

aten = torch.ops.aten
# Beside operations element by element.
_COMPUTED = {
    aten.view.default, aten.reshape.default, aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default,
    aten.squeeze.default, aten.unsqueeze.default, aten.lift_fresh_copy.default, aten.stack.default, aten.cat.default,
    aten.sum.default, aten.mean.default, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default,
    aten.full.default, aten.scalar_tensor.default,
}  # fmt: skip


def computed_from(value: Node, found: Terms, is_known: Callable[[Node], bool]) -> list[Node] | None:
    """Numbers that a value is computed from, in the order met; None if it is computed from something else, too, such as samples.

    Args:
        is_known: is a node put together from its parts, by weights?
    """
    sources: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not _is_constant(node):
            what = found.of(node).what
            single = node.op == "call_function" and node.meta["val"].numel() == 1
            if single and what not in (ROWS, OTHER) and is_known(node):
                sources[node] = None
                continue
            if what == ROWS:
                return None
        if not _is_computed(node, found):
            return None
        stack += reversed(node.all_input_nodes)
    return list(sources)


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def _is_computed(node: Node, found: Terms) -> bool:
    """Does it compute the same of the same numbers, whatever the number of samples?"""
    if found.following.is_made_of_size(node):
        return False
    target: Any = node.target
    if node.op == "get_attr":
        return True
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return (pointwise or target in _COMPUTED) and not _torch.is_random(node) and not target._schema.is_mutable


def computation(value: Node, sources: Sequence[Node], names: tuple[str, ...], constants: torch.nn.Module | None) -> Computed:
    """What is computed of the sources, as code; `names` are theirs."""
    graph, made = torch.fx.Graph(), dict[Node, Node]()
    for i, node in enumerate(sources):
        made[node] = graph.placeholder(f"of_{i}")
    stack = [value]
    while stack:
        node = stack[-1]
        missing = [x for x in node.all_input_nodes if x not in made] if node not in made else []
        if not missing:
            stack.pop()
            if node not in made:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                made[node] = graph.create_node(node.op, node.target, args, kwargs)
        stack += missing
    graph.output((made[value],))
    text = str(graph)
    run, like = compile_boxed(graph, constants), [node.meta["val"] for node in sources]
    given = [(x.dtype, tuple(x.shape)) for x in like]

    def of(values: Sequence[torch.Tensor]) -> torch.Tensor:
        (result,) = run([x.to(dtype).reshape(shape) for x, (dtype, shape) in zip(values, given, strict=True)])
        return result

    return Computed(names, of, text)
