"""Lookups in a table that is sharded by rows, or in scores that are sharded by classes.

`ids` are the indices of a member's shard, one after another. An index of another member gives zero, so the
members' results are terms of a sum. If `ids` has all indices, the member does the whole lookup. In the
forward operations, torch raises an error for an index that no member owns, as in the whole lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_piper.ir.values import Sharded
from lightning_piper.placements.rule import P, R, Rule

IGNORED = -100  # an index that picks no element


@torch.library.custom_op("lightning_piper::rows", mutates_args=())
def _rows(table: Tensor, index: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return the `embedding` from one rank's shard of the table, whose rows have the indices `ids`.

    The result is zero for indices of other ranks, so the sum over ranks is the embedding. `size` is the
    number of rows of the whole table.
    """
    own = _own(index, ids)
    found = torch.nn.functional.embedding(_local(index, ids, own, size), table)
    return found.masked_fill_(~own.unsqueeze(-1), 0)


@_rows.register_fake
def _(table: Tensor, index: Tensor, ids: Tensor, size: int) -> Tensor:
    return table.new_empty(*index.shape, table.shape[1])


@torch.library.custom_op("lightning_piper::rows_backward", mutates_args=())
def _rows_backward(grad: Tensor, index: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Return the gradient of a member's shard of the table. Indices equal to `padding` do not contribute."""
    own = _own(index, ids) & (index != padding)
    nowhere = torch.where(own, index - ids[0], -1)  # `embedding_dense_backward` ignores -1
    made: Tensor = torch.ops.aten.embedding_dense_backward(grad, nowhere, ids.shape[0], -1, False)
    return made


@_rows_backward.register_fake
def _(grad: Tensor, index: Tensor, ids: Tensor, padding: int) -> Tensor:
    return grad.new_empty(ids.shape[0], grad.shape[-1])


@torch.library.custom_op("lightning_piper::picked", mutates_args=())
def _picked(x: Tensor, index: Tensor, ids: Tensor, dim: int, size: int) -> Tensor:
    """Return the elements of a member's shard along a dimension, one for each index (`gather`).

    The result is zero for indices of other members and for `IGNORED`. `size` is the size of the whole
    dimension.
    """
    own = _own(index, ids)
    local = _local(index, ids, own | (index == IGNORED), size)
    return x.gather(dim, local.masked_fill(~own & (index == IGNORED), 0)).masked_fill_(~own, 0)


@_picked.register_fake
def _(x: Tensor, index: Tensor, ids: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty(index.shape)


@torch.library.custom_op("lightning_piper::spread", mutates_args=())
def _spread(grad: Tensor, index: Tensor, ids: Tensor, dim: int) -> Tensor:
    """Return the gradient of `picked` for a member's shard: zero except for the elements that were picked."""
    own = _own(index, ids)
    shape = list(grad.shape)
    shape[dim] = ids.shape[0]
    local = torch.where(own, index - ids[0], 0)
    return grad.new_zeros(shape).scatter_add_(dim, local, grad.masked_fill(~own, 0))


@_spread.register_fake
def _(grad: Tensor, index: Tensor, ids: Tensor, dim: int) -> Tensor:
    shape = list(grad.shape)
    shape[dim] = ids.shape[0]
    return grad.new_empty(shape)


ROWS, ROWS_BACKWARD = torch.ops.lightning_piper.rows.default, torch.ops.lightning_piper.rows_backward.default
PICKED, SPREAD = torch.ops.lightning_piper.picked.default, torch.ops.lightning_piper.spread.default
# Operation -> the position of its argument `size`. The backward operations do not have this argument.
SIZES = {ROWS: 3, PICKED: 4}


def _rows_rules(node: Node) -> Iterator[Rule]:
    yield Rule((Sharded(0), R, Sharded(0)), (P,))


def _rows_backward_rules(node: Node) -> Iterator[Rule]:
    yield Rule((R, R, Sharded(0)), (Sharded(0),))


def _picked_rules(node: Node) -> Iterator[Rule]:
    yield Rule((Sharded(_dim(node)), R, Sharded(0)), (P,))


def _spread_rules(node: Node) -> Iterator[Rule]:
    yield Rule((R, R, Sharded(0)), (Sharded(_dim(node)),))


def _dim(node: Node) -> int:
    dim: Any = node.args[3]
    return int(dim)


LOOKUPS: dict[Any, Callable[[Node], Iterator[Rule]]] = {
    ROWS: _rows_rules,
    ROWS_BACKWARD: _rows_backward_rules,
    PICKED: _picked_rules,
    SPREAD: _spread_rules,
}


def _own(index: Tensor, ids: Tensor) -> Tensor:
    """Return a mask of the indices that are in `ids`, which is ascending without gaps."""
    return (index >= ids[0]) & (index <= ids[-1])


def _local(index: Tensor, ids: Tensor, own: Tensor, size: int) -> Tensor:
    """Return the position in the member's shard of each index for which the mask `own` is true.

    The result for any other index is 0 if another member owns the index. If no member owns it, the result
    lies outside of the shard, so that torch raises an error.
    """
    anybody = (index >= 0) & (index < size)
    return torch.where(own, index - ids[0], torch.where(anybody, 0, torch.where(index < 0, -1 - size, size)))
