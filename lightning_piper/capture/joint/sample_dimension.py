"""Find values of a traced graph that certainly have the batch's samples along their first dimension, whatever
the number of samples is.

A value counts only if its operation makes this certain. For all other values, `losses.batch_dependence`
compares a second trace.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import COPIES, PERMUTATIONS, RESHAPES, SOFTMAXES

aten = torch.ops.aten
# Operations that keep the first dimension of one operand -> the index of that operand among the arguments.
_KEEP: dict[Any, int] = {
    aten.addmm.default: 1, aten.mm.default: 0, aten.bmm.default: 0, aten.convolution.default: 0,
    aten.embedding.default: 1,
    aten.native_layer_norm.default: 0, aten.native_group_norm.default: 0, aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit_functional.default: 0, **dict.fromkeys(SOFTMAXES, 0),
    aten.gather.default: 2, aten.max_pool2d_with_indices.default: 0, aten.avg_pool2d.default: 0,
    aten._adaptive_avg_pool2d.default: 0, aten._scaled_dot_product_flash_attention_for_cpu.default: 0,
    aten._scaled_dot_product_efficient_attention.default: 0,
    aten._scaled_dot_product_flash_attention.default: 0,
    aten.nll_loss_forward.default: 0, **dict.fromkeys(COPIES, 0), aten.squeeze.dim: 0,
    aten.unsqueeze.default: 0, aten.select.int: 0,
    aten.slice.Tensor: 0,
    aten.index_select.default: 0, aten.argmax.default: 0, aten.amax.default: 0, aten.sum.dim_IntList: 0,
    aten.mean.dim: 0,
    aten.logsumexp.default: 0, operator.getitem: 0,
}  # fmt: skip
# Operations of `_KEEP` whose second argument gives the dimensions along which they work.
_ALONG = {
    *SOFTMAXES, aten.gather.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.select.int, aten.slice.Tensor, aten.index_select.default, aten.argmax.default, aten.amax.default,
    aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default,
}  # fmt: skip
_ARANGE = {aten.arange.default, aten.arange.start, aten.arange.start_step}


def known_rows(graph: torch.fx.Graph, size: int) -> set[Node]:
    """Return the nodes whose first dimension certainly follows the samples: it has the samples in their order,
    perhaps merged with the dimensions after it, as in a view of `[n, tokens, dim]` as `[n * tokens, dim]`.

    Args:
        size: the number of samples in the trace.

    Returns:
        Placeholders of the batch's tensors that have dimensions, and forward operations. Of an operation with
            several results, the first result counts.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta.get("desc"), _torch.PlainAOTInput) and shape_of(node):
                found.add(node)
            continue
        forward = node.op == "call_function" and not _torch.is_backward(node)
        if forward and any(x in found for x in node.all_input_nodes) and _follows(node, found, size):
            found.add(node)
    return found


def is_kept(node: Node, rows: set[Node]) -> bool:
    """Return whether the node is among `rows`, and comes from an operation that keeps the first dimension of
    one operand."""
    return node.target in _KEEP and node in rows


def _follows(node: Node, found: set[Node], size: int) -> bool:
    """Return whether the first dimension of a node's value certainly follows the samples.

    Args:
        found: the earlier nodes whose first dimension follows the samples.
        size: the number of samples in the trace.
    """
    target: Any = node.target
    shape = shape_of(node)
    if not shape:
        # The first result has no dimensions. If there are several results, a later one may follow the
        # samples.
        return isinstance(node.meta.get("val"), tuple | list) and _operand(node) in found
    source = _operand(node)
    if target in RESHAPES:
        same = math.prod(shape) == math.prod(shape_of(source) or (0,))
        return (
            source in found
            and same
            and shape[0] % size == 0
            and (shape[0] == size or _flattens(shape_of(source), shape))
        )
    if target is aten.index.Tensor:  # one row for each sample: x[torch.arange(len(x)), chosen]
        return source in found and shape[0] == size and _counts(node.args[1][0], size)  # type: ignore[index]
    if target is aten.cat.default:
        return (node.args[1] if len(node.args) > 1 else 0) not in (0, -len(shape))
    if target in PERMUTATIONS:
        return source in found and _keeps_first(node)
    if target is aten.expand.default:
        return source in found and len(shape_of(source)) == len(shape) and shape_of(source)[0] == shape[0]
    if target in _ALONG and _along_first(node, len(shape_of(source))):
        return False
    if target in _KEEP:
        return source in found and (shape_of(source) or shape)[0] == shape[0] and shape[0] % size == 0
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        whole = len(shape)
        return any(
            x in found and len(shape_of(x)) == whole and shape_of(x)[0] == shape[0]
            for x in node.all_input_nodes
        )
    return False


def _along_first(node: Node, ndim: int) -> bool:
    """Return whether an operation of `_ALONG` works along the first dimension: its second argument names that
    dimension, or is missing, None or empty, which stands for all dimensions."""
    given: Any = node.args[1] if len(node.args) > 1 else 0
    dims = given if isinstance(given, tuple | list) else [given]
    return any(dim is None or dim in (0, -ndim, -ndim - 1) for dim in dims) or not dims


def _counts(node: Any, size: int) -> bool:
    """Return whether the value is certainly `arange(size)`: the index of each sample, in order. Copies and
    casts of it count too."""
    if not isinstance(node, Node) or shape_of(node) != (size,):
        return False
    if node.target in COPIES:
        return _counts(node.args[0], size)
    return node.target in _ARANGE and node.args in ((size,), (0, size))


def _keeps_first(node: Node) -> bool:
    """Return whether the first dimension of the result of a reordering is the first dimension of its source.
    Shapes do not show this if dimensions have equal sizes."""
    ndim = len(shape_of(node))
    order = list(range(ndim))
    if node.target is aten.permute.default:
        order = [int(dim) % ndim for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        a, b = (0, ndim - 1) if node.target is aten.t.default else (int(dim) % ndim for dim in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return order[0] == 0


def _flattens(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether the view merges leading dimensions into one. The samples then keep their order."""
    return any(
        math.prod(before[:k]) == after[0] and before[k:] == after[1:] for k in range(1, len(before) + 1)
    )


def _operand(node: Node) -> Any:
    position = _KEEP.get(node.target, 0)
    return node.args[position] if position < len(node.args) else None


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value. If the node has several results, return the shape of the first
    one. Return () for a tensor without dimensions, and for anything that is not a tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, tuple | list) and value and isinstance(value[0], torch.Tensor):
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
