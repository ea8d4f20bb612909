"""Where the samples of a batch certainly meet on their way to the loss: one is taken by its place, or all are compared with all.

The loss of a part of the batch is then made of other samples than that of the whole. Only what is certain by the operation is
found, so that nothing is said of a step that does not do it; what all operations do is seen by running them (`piper.verify`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.rowwise import known_rows, shape_of

aten = torch.ops.aten
# They take rows by their place, put them elsewhere, or look across them, if they work along the first dimension.
_ALONG = {
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.flip.default,
    aten.index_select.default, aten.roll.default, aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default,
    aten._softmax.default, aten._log_softmax.default,
}  # fmt: skip
_POOL = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction, aten.std.correction}
_TURN = {aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}
_PAIRS = {aten.mm.default, aten.addmm.default, aten._cdist_forward.default, aten._euclidean_dist.default}


def meeting(graph: torch.fx.Graph, loss: Any, size: int) -> Node | None:
    """The first operation on the way to the loss of `size` samples in which they certainly meet; None if there is none."""
    if size == 1:
        return None
    rows = {node for node in known_rows(graph, size) if shape_of(node)[:1] == (size,)}
    across: set[Node] = set()  # made of rows: their samples are in the second dimension now, or gone in sums
    needed = _needed(loss)
    node: Node
    for node in graph.nodes:
        if node not in needed or node.op != "call_function" or _torch.is_backward(node):
            continue
        source = node.args[0] if node.args else None
        turned = node.target in _TURN and shape_of(node)[1:2] == (size,) and shape_of(node) != shape_of(source)
        pooled = node.target in _POOL and _along_first(node) and shape_of(node) != ()
        if source in rows and (turned or pooled):
            across.add(node)
        elif node.target in _ALONG and source in rows and _along_first(node) and not _is_whole(node):
            return node
        elif node.target in _PAIRS or _is_pointwise(node):
            own = any(x in rows and len(shape_of(x)) == len(shape_of(node)) for x in node.all_input_nodes)
            others = any(x in across for x in node.all_input_nodes)
            if own and (others or "dist" in str(node.target)):
                return node
            if others and _is_pointwise(node):
                across.add(node)
    return None


def _needed(loss: Any) -> set[Node]:
    found: set[Node] = set()
    waiting = [loss] if isinstance(loss, Node) else []
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _argument(node: Node, name: str) -> Any:
    """An argument of an operation of torch, or its default."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _along_first(node: Node) -> bool:
    named = _argument(node, "dim")
    dims = _argument(node, "dims") if named is None else named
    ndim = len(shape_of(node.args[0]))
    return any(dim in (0, -ndim) for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def _is_whole(node: Node) -> bool:
    """A slice that leaves nothing out."""
    return node.target is aten.slice.Tensor and shape_of(node) == shape_of(node.args[0])


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
