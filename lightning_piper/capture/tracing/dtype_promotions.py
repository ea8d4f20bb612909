"""Write the precision's default dtype into the graph, because the captured step runs outside of the context
that sets it."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten


def settle_dtypes(graph: torch.fx.Graph) -> None:
    """Insert conversions of the integers and bools that elementwise operations read, if torch would convert them
    to the default dtype, and this dtype was different during the step. The graph is changed in place.

    For example, `mask.sum() + 1e-6` has the default dtype. Lightning's `64-true` and `bf16-true` set the
    default dtype only around the step, so call this outside of the step's context.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype == torch.get_default_dtype()
        ):
            continue
        elementwise = (
            isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        )
        values = [x.meta.get("val") for x in node.all_input_nodes]
        whole = all(
            isinstance(x, torch.Tensor) and not x.is_floating_point() and not x.is_complex() for x in values
        )
        if elementwise and whole and node.kwargs.get("dtype") is None:
            for x in node.all_input_nodes:
                node.replace_input_with(x, _converted(graph, node, x, value.dtype))


def _converted(graph: torch.fx.Graph, node: Node, x: Node, dtype: torch.dtype) -> Node:
    with graph.inserting_before(node):
        made: Node = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    made.meta = {**node.meta, "val": x.meta["val"].to(dtype)}
    return made
