"""Families of torch operations that several packages ask for: which operations reshape, reorder dimensions, copy,
sum, add, multiply or divide.

A table that answers one package's own question stays in that package, and is built from these families where it
can be.
"""

import torch
from torch.fx import Node

aten = torch.ops.aten

# Operations that give a tensor another shape, with the elements in the same order.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
# Operations that reorder dimensions.
PERMUTATIONS = {aten.t.default, aten.transpose.int, aten.permute.default}
# Operations whose result has the elements and the shape of the input. `_to_copy` may change the dtype.
COPIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default}
SUMS = {aten.sum.default, aten.sum.dim_IntList}
MEANS = {aten.mean.default, aten.mean.dim}
# Additions and subtractions of two operands.
ADDED = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor,
}  # fmt: skip
MULTIPLIED = {aten.mul.Tensor, aten.mul.Scalar}
DIVIDED = {aten.div.Tensor, aten.div.Scalar}
SOFTMAXES = {aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default}
# Negative log likelihoods. Results: the loss, and the total weight of the labels that count.
NLL = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def permutation(node: Node) -> list[int]:
    """Return, for each dimension of the result of an operation in `PERMUTATIONS`, its dimension in the input."""
    rank = len(node.meta["val"].shape)
    if node.target is aten.t.default:
        return list(reversed(range(rank)))
    if node.target is aten.transpose.int:
        order = list(range(rank))
        a, b = (int(x) % rank for x in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
        return order
    return [int(x) % rank for x in node.args[1]]  # type: ignore[union-attr, arg-type]
