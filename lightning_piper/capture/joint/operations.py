"""Tables of torch operations, by what they do with samples: reduce over them, pass on a reduced value, or
calculate with it.

`losses` uses the tables to find how a loss on parts of the batch combines, and `joined_part` to find the joined
part. To support a further operation there, add it to its table.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.common.operation_families import (
    ADDED,
    COPIES,
    DIVIDED,
    MEANS,
    MULTIPLIED,
    PERMUTATIONS,
    RESHAPES,
    SQUEEZES,
    SUMS,
)

aten = torch.ops.aten

# Losses with a reduction: operation -> index of its argument `reduction` (0 none, 1 mean, 2 sum).
LOSSES = {
    aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3, aten.binary_cross_entropy_with_logits.default: 4,
    aten.multilabel_margin_loss_forward.default: 2, aten.multi_margin_loss.default: 5,
}  # fmt: skip
# Operations that return a reduced value unchanged, reshaped, cast or negated, or some of its elements.
SAME = {
    *RESHAPES, *SQUEEZES, *PERMUTATIONS, *COPIES, aten.unsqueeze.default, aten.neg.default, aten.expand.default,
    aten.select.int, aten.slice.Tensor, operator.getitem,
}  # fmt: skip
# Operations that return a maximum or minimum of values -> which of the two.
_EXTREMES: dict[Any, str] = {
    aten.max.default: "max", aten.amax.default: "max", aten.any.default: "max", aten.any.dim: "max",
    aten.min.default: "min", aten.amin.default: "min", aten.all.default: "min", aten.all.dim: "min",
}  # fmt: skip
# Operations that return a maximum or minimum as the first of several results -> which of the two.
_FIRST_EXTREMES: dict[Any, str] = {aten.max.dim: "max", aten.min.dim: "min"}
OTHER_END = {"max": "min", "min": "max"}  # extreme of a value -> extreme of the negated value
# Products of matrices. If both factors have the samples along the summed dimension, the result is a sum over
# samples.
CONTRACTED = {aten.dot.default, aten.mv.default, aten.mm.default, aten.bmm.default}
# Operations that choose between values -> the indices of these values among the arguments.
CHOSEN = {aten.where.self: (1, 2), aten.masked_fill.Scalar: (0, 2), aten.masked_fill.Tensor: (0, 2)}
ZEROS = {aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default}
JOINED = {aten.stack.default, aten.cat.default}
# Operations that add rows at given indices: operation -> index of the argument with the rows.
SCATTERED = {aten.scatter_add.default: 3, aten.index_add.default: 3, aten.index_put.default: 2}
# Operations whose inputs `loss_terms` follows, to find out how the result combines over parts of the batch.
CHAINED = {*SAME, *SUMS, *MEANS, *JOINED, *ADDED, *MULTIPLIED, *DIVIDED, *CHOSEN, *SCATTERED}


def is_zero(value: Any) -> bool:
    """Return whether the value, a number or a node, is certainly 0.

    True for the number 0, a node whose operation fills a tensor with 0, and a chain of operations in `SAME` on
    such a node.
    """
    while isinstance(value, Node) and value.target in SAME:
        value = value.args[0]
    if isinstance(value, Node) and value.target is aten.full.default:
        value = value.args[1]
    return value == 0 if isinstance(value, int | float) else value.target in ZEROS


def is_coarser(node: Node) -> bool:
    """Return whether the node is a cast from floating-point or complex numbers to integers, or from any other
    dtype to booleans. The sum of such casts of parts is not the cast of the parts' sum."""
    source: Any = node.args[0]
    if node.target is not aten._to_copy.default:
        return False
    made, given = (x.meta["val"].dtype for x in (node, source))
    return not (made.is_floating_point or made.is_complex) and (
        made != given and (made == torch.bool or given.is_floating_point or given.is_complex)
    )


def extreme_of(node: Node) -> tuple[str, Node] | None:
    """Return "max" or "min" and the reduced value, if the node is the maximum or minimum of elements of a value.
    Otherwise return None.

    `any` counts as a maximum and `all` as a minimum. For `x.max(dim)`, whose results are values and indices, the
    node is the `getitem` of the values.
    """
    made: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    which = _EXTREMES.get(made.target) if made is node else _FIRST_EXTREMES.get(made.target)
    return None if which is None else (which, made.args[0])


# Operations that read only the shape of their input -> the value of all elements, or None if the last
# argument is this value. For `empty_like`, `new_empty` and `new_empty_strided` the table has 0: their elements are
# undefined, and correct code overwrites them before it reads them.
CONSTANTS = {aten.new_zeros.default: 0.0, aten.new_ones.default: 1.0, aten.zeros_like.default: 0.0,
    aten.ones_like.default: 1.0,
             aten.new_full.default: None, aten.full_like.default: None, aten.empty_like.default: 0.0,
             aten.new_empty.default: 0.0, aten.new_empty_strided.default: 0.0}  # fmt: skip


def is_product_with_zero(node: Node) -> bool:
    """Return whether the value is a product with the number 0, such as `0.0 * x.sum()`."""
    return node.target in MULTIPLIED and any(type(x) in (int, float) and x == 0 for x in node.args[:2])
