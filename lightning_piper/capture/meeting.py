"""Where the samples of a batch certainly meet on their way to the loss: one is taken by its place, or all are compared with all.

The loss of a part of the batch is then made of other samples than that of the whole. Only what is certain by the operation is
found, so that nothing is said of a step that does not do it; what all operations do is seen by running them (`piper.verify`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.rowwise import is_first_of, known_rows, shape_of
from lightning_piper.ir.regions import PassKey, StepCode

aten = torch.ops.aten
# They take rows by their place, put them elsewhere, or look across them, if they work along the first dimension.
_ALONG = {
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.flip.default,
    aten.index_select.default, aten.roll.default, aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default,
    aten._softmax.default, aten._log_softmax.default,
}  # fmt: skip
_POOL = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction, aten.std.correction}
_POOL_ALL = {
    aten.mean.default, aten.sum.default, aten.std.correction, aten.var.correction, aten.mean.dim, aten.sum.dim_IntList,
}  # fmt: skip
_SUMS = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor, aten.neg.default,
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.where.self, aten.masked_fill.Scalar,
}  # fmt: skip
_PRODUCTS, _QUOTIENTS = {aten.mul.Tensor, aten.mul.Scalar}, {aten.div.Tensor, aten.div.Scalar}
# On numbers of each sample: what is linear in them, and what is not, as they are with a number of the whole batch beside them.
_LINEAR_IN_EACH = {
    aten.sum.dim_IntList, aten.mean.dim, aten.cumsum.default, aten.select.int, aten.slice.Tensor, aten.view.default,
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.cat.default,
}  # fmt: skip
_CURVED = {
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.prod.dim_int,
    aten.logsumexp.default, aten.linalg_vector_norm.default, aten.var.correction, aten.std.correction, aten.mse_loss.default,
    aten.smooth_l1_loss.default, aten.huber_loss.default,
}  # fmt: skip
_TURN = {aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}
_PRODUCTS_OF_MATRICES = {aten.mm.default, aten.addmm.default}
_PAIRS = {*_PRODUCTS_OF_MATRICES, aten._cdist_forward.default, aten._euclidean_dist.default}


def meetings(graph: torch.fx.Graph, size: int) -> dict[Node, int]:
    """The operations of a graph of `size` samples in which they certainly meet, with their places."""
    if size == 1:
        return {}
    rows = {node for node in known_rows(graph, size) if shape_of(node)[:1] == (size,)}
    across: set[Node] = set()  # made of rows: their samples are in the second dimension now, or gone in sums
    numbers: set[Node] = set()  # sums and means of all rows
    beside: set[Node] = set()  # rows with such a number in each: what is not linear in it lets samples meet
    found: dict[Node, int] = {}
    for place, node in enumerate(graph.nodes):
        if node.op != "call_function" or _torch.is_backward(node):
            continue
        source = node.args[0] if node.args else None
        turned = node.target in _TURN and is_first_of(node, 1)
        if source in beside and node.target in _CURVED:
            found[node] = place
            continue
        if source in beside and node.target in _LINEAR_IN_EACH and shape_of(node)[:1] == (size,) and not _along_first(node):
            beside.add(node)
            continue
        pooled = node.target in _POOL and _along_first(node) and shape_of(node) != ()
        if source in rows and (turned or pooled):
            across.add(node)
        elif source in rows and shape_of(node) == () and node.target in _POOL_ALL:
            numbers.add(node)
        elif node.target in _ALONG and source in rows and _along_first(node) and not _is_whole(node):
            found[node] = place
        elif node.target in _PAIRS or _is_pointwise(node):
            own = any(x in rows and len(shape_of(x)) == len(shape_of(node)) for x in node.all_input_nodes)
            others = any(x in across for x in node.all_input_nodes)
            if own and (others or "dist" in str(node.target)) and not _is_contracted(node, across):
                found[node] = place
            elif others and _is_pointwise(node):
                across.add(node)
            elif any(x in beside for x in node.all_input_nodes) and not _is_linear(node, beside):
                found[node] = place
            elif any(x in numbers or x in beside for x in node.all_input_nodes):
                (beside if own else numbers).add(node)
    return found


def met(result: Any, found: dict[Node, int]) -> Node | None:
    """The first operation on the way to a result in which samples meet; None if there is none."""
    needed = way_to(result) if found else set()
    return min((node for node in found if node in needed), key=found.__getitem__, default=None)


def _is_contracted(node: Node, across: set[Node]) -> bool:
    """Does a product of matrices sum over samples, as `x.T @ x`, and not compare them, as `x @ x.T`?"""
    return node.target in _PRODUCTS_OF_MATRICES and node.all_input_nodes[-2] in across


def _is_linear(node: Node, beside: set[Node]) -> bool:
    """Is it, in what is beside each sample?"""
    first, second = (*node.args, None, None)[:2]
    if node.target in _SUMS:
        return True
    if node.target in _PRODUCTS:
        return not (first in beside and second in beside)
    return node.target in _QUOTIENTS and second not in beside


def way_to(result: Any) -> set[Node]:
    """What a result is made of, and it."""
    found: set[Node] = set()
    waiting = [result] if isinstance(result, Node) else []
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


def is_by_frequency(node: Node) -> bool:
    """Is it the gradient of an embedding that is divided by how often each index occurs?"""
    return isinstance(node.target, torch._ops.OpOverload) and bool(_argument(node, "scale_grad_by_freq"))


def takes_statistics(code: StepCode, key: PassKey) -> bool:
    """Is it a forward pass with a batch norm that takes its statistics from the samples that it gets?"""
    names = [str(node.target) for node in code.code[key].graph.nodes] if key[1] == "F" else []
    return any("batch_norm" in name and (code.interfaces[key].state or "no_stats" in name) for name in names)
