"""Lookups in a table of which each member of an axis has a run of rows, or in scores for such a run of classes.

`ids`, the numbers of a member's run, say which indices are its own; elsewhere there is zero, so that the members' results are terms
of a sum. One member with all the numbers does what the lookup of the whole does. An index that is nobody's is handed to torch as it
is, which refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_piper.ir.values import Shard
from lightning_piper.placements.rule import P, R, Rule

IGNORED = -100  # an index that picks nothing


@torch.library.custom_op("lightning_piper::rows", mutates_args=())
def _rows(table: Tensor, index: Tensor, ids: Tensor, size: int) -> Tensor:
    """Rows of a table (`embedding`). `size`: of the whole table."""
    own = _own(index, ids)
    found = torch.nn.functional.embedding(_local(index, ids, own, size), table)
    return found.masked_fill_(~own.unsqueeze(-1), 0)


@_rows.register_fake
def _(table: Tensor, index: Tensor, ids: Tensor, size: int) -> Tensor:
    return table.new_empty(*index.shape, table.shape[1])


@torch.library.custom_op("lightning_piper::rows_backward", mutates_args=())
def _rows_backward(grad: Tensor, index: Tensor, ids: Tensor, padding: int) -> Tensor:
    """The gradient of the table; nothing of it comes from indices that are `padding`."""
    own = _own(index, ids) & (index != padding)
    nowhere = torch.where(own, index - ids[0], -1)
    made: Tensor = torch.ops.aten.embedding_dense_backward(grad, nowhere, ids.shape[0], -1, False)
    return made


@_rows_backward.register_fake
def _(grad: Tensor, index: Tensor, ids: Tensor, padding: int) -> Tensor:
    return grad.new_empty(ids.shape[0], grad.shape[-1])


@torch.library.custom_op("lightning_piper::picked", mutates_args=())
def _picked(x: Tensor, index: Tensor, ids: Tensor, dim: int, size: int) -> Tensor:
    """Elements along a dimension (`gather`), one for each index; zero for one that is `IGNORED`. `size`: of the whole dimension."""
    own = _own(index, ids)
    local = _local(index, ids, own | (index == IGNORED), size)
    return x.gather(dim, local.masked_fill(~own & (index == IGNORED), 0)).masked_fill_(~own, 0)


@_picked.register_fake
def _(x: Tensor, index: Tensor, ids: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty(index.shape)


@torch.library.custom_op("lightning_piper::spread", mutates_args=())
def _spread(grad: Tensor, index: Tensor, ids: Tensor, dim: int) -> Tensor:
    """The gradient of `picked`: zero but for the elements that were picked."""
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
# Where the size of what is divided stands among the arguments of each; the rows' gradient takes it from `ids`.
SIZES = {ROWS: 3, PICKED: 4}


def _rows_rules(node: Node) -> Iterator[Rule]:
    yield Rule((Shard(0), R, Shard(0)), (P,))


def _rows_backward_rules(node: Node) -> Iterator[Rule]:
    yield Rule((R, R, Shard(0)), (Shard(0),))


def _picked_rules(node: Node) -> Iterator[Rule]:
    yield Rule((Shard(_dim(node)), R, Shard(0)), (P,))


def _spread_rules(node: Node) -> Iterator[Rule]:
    yield Rule((R, R, Shard(0)), (Shard(_dim(node)),))


def _dim(node: Node) -> int:
    dim: Any = node.args[3]
    return int(dim)


LOOKUPS: dict[Any, Callable[[Node], Iterator[Rule]]] = {
    ROWS: _rows_rules, ROWS_BACKWARD: _rows_backward_rules, PICKED: _picked_rules, SPREAD: _spread_rules,
}  # fmt: skip


def _own(index: Tensor, ids: Tensor) -> Tensor:
    return (index >= ids[0]) & (index <= ids[-1])


def _local(index: Tensor, ids: Tensor, own: Tensor, size: int) -> Tensor:
    """Where an index is in the member's run, if it is; one of another member's is 0, and one that is nobody's stays what it is, or
    becomes one that is nobody's there."""
    anybody = (index >= 0) & (index < size)
    return torch.where(own, index - ids[0], torch.where(anybody, 0, torch.where(index < 0, -1 - size, size)))
