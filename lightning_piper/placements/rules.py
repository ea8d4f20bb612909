"""Sharding rules of operations: the placements that an operation can read and the outputs' placements.

Every operation can read whole tensors (`R` for all inputs makes `R`). The rules add further options. An
operation without a rule runs on whole tensors on every member. The rules follow from the definitions of the
operations, and `proof.py` proves them by execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.common.operation_families import (
    COPIES,
    DIVIDED,
    MULTIPLIED,
    NLL,
    PERMUTATIONS,
    RESHAPES,
    SOFTMAXES,
    SQUEEZES,
    SUMS,
    permutation,
)
from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.attention import ATTENTION, attention_rules
from lightning_piper.placements.chunked_scores import CHUNKED
from lightning_piper.placements.local_graph import SPLIT
from lightning_piper.placements.ring import PARTS, RING
from lightning_piper.placements.rule import P, R, Rule, along_of, argument, made_by, shape_of, tensors_of
from lightning_piper.placements.views import regrouping
from lightning_piper.placements.vocabulary import LOOKUPS

aten = torch.ops.aten


def rules_for(node: Node, degree: int, blocks: Collection[int] = ()) -> list[Rule]:
    """Return the sharding rules of an operation; first the rule for whole tensors. An operation that is not
    known has only this rule.

    Args:
        node: The operation.
        degree: The number of members. Only rules whose shards are equal in size are returned.
        blocks: Values of `Sharded.blocks`. The result has rules for shards with these numbers of runs.
    """
    inputs, outputs = tensors_of(node), made_by(node)
    whole = Rule((R,) * len(inputs), tuple(R if isinstance(x, torch.Tensor) else None for x in outputs))
    target: Any = node.target
    family = _FAMILIES.get(target)
    if family is None and isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
        family = (
            _pointwise
            if torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags
            else None
        )
    found = [] if family is None else list(family(node))
    if family is _view:
        pairs = regrouping(shape_of(inputs[0]), shape_of(node), degree, blocks)
        found += [Rule((before,), (after,)) for before, after in pairs]
    elif target not in PARTS:  # rules of the operations in PARTS contain their number of runs
        found += [_in_blocks(rule, count) for rule in found for count in blocks if count > 1]
    return [whole, *(rule for rule in dict.fromkeys(found) if _divides(rule, node, inputs, outputs, degree))]


def _in_blocks(rule: Rule, count: int) -> Rule:
    """Return the same rule for shards with `count` times as many runs.

    This is valid because an operation treats all positions along a divided dimension in the same way, sums
    over them, or concatenates runs.
    """

    def blocked(placement: Placement | None) -> Placement | None:
        return (
            replace(placement, blocks=placement.blocks * count)
            if isinstance(placement, Sharded)
            else placement
        )

    return Rule(tuple(blocked(p) or R for p in rule.inputs), tuple(map(blocked, rule.outputs)))


def _divides(rule: Rule, node: Node, inputs: Sequence[Node], outputs: Sequence[Any], degree: int) -> bool:
    """Return whether each divided dimension exists, and each of its runs can be divided evenly."""
    held = [*zip(rule.inputs, (shape_of(x) for x in inputs), strict=True)]
    held += [
        (p, tuple(x.shape))
        for p, x in zip(rule.outputs, outputs, strict=True)
        if isinstance(x, torch.Tensor) and p
    ]
    return all(
        not isinstance(placement, Sharded)
        or (
            placement.dim < len(shape)
            and shape[placement.dim] > 1
            and shape[placement.dim] % (degree * placement.blocks) == 0
        )
        for placement, shape in held
    )


# Elementwise operations

_ADDITIVE = {aten.add.Tensor, aten.sub.Tensor}
# Operations that are linear in the first input. `mul.Tensor` is also linear in the second input.
_SCALED = MULTIPLIED | DIVIDED
# Linear operations with one input.
_LINEAR = {aten.neg.default, *COPIES}


def _pointwise(node: Node) -> Iterator[Rule]:
    """Yield the rules of an elementwise operation: shards along each dimension, and partial sums if the
    operation is linear."""
    inputs, count = tensors_of(node), len(made_by(node))
    shapes = [shape_of(x) for x in inputs]
    rank = max(map(len, shapes), default=0)
    for d in range(rank):
        held = tuple(along_of(shape, d - (rank - len(shape))) for shape in shapes)
        if any(isinstance(placement, Sharded) for placement in held):
            yield Rule(held, (Sharded(d),) * count)
    if node.target in _ADDITIVE and len(inputs) == 2:
        yield Rule((P, P), (P,))
    elif node.target in _LINEAR and node.meta["val"].is_floating_point():
        yield Rule((P,), (P,))
    elif node.target in _SCALED and node.meta["val"].is_floating_point():
        yield Rule((P, R)[: len(inputs)], (P,))
        if node.target is aten.mul.Tensor and len(inputs) == 2 and inputs[0] is not inputs[1]:
            yield Rule((R, P), (P,))


# Products. A shard of a dimension of the output is computed from the same shard of one factor. If both
# factors are sharded along the dimension that is summed over, each member makes a term of the sum.


def _mm(node: Node) -> Iterator[Rule]:
    yield Rule((Sharded(0), R), (Sharded(0),))
    yield Rule((R, Sharded(1)), (Sharded(1),))
    yield Rule((Sharded(1), Sharded(0)), (P,))
    yield from (Rule((P, R), (P,)), Rule((R, P), (P,)))


def _bmm(node: Node) -> Iterator[Rule]:
    yield Rule((Sharded(0), Sharded(0)), (Sharded(0),))
    yield Rule((Sharded(1), R), (Sharded(1),))
    yield Rule((R, Sharded(2)), (Sharded(2),))
    yield Rule((Sharded(2), Sharded(1)), (P,))
    yield from (Rule((P, R), (P,)), Rule((R, P), (P,)))


def _addmm(node: Node) -> Iterator[Rule]:
    """Yield the rules of `bias + a @ b`. The summed dimension is not divided, because each member would add
    the whole bias."""
    bias = shape_of(tensors_of(node)[0])
    last = len(bias) - 1
    yield Rule((along_of(bias, last), R, Sharded(1)), (Sharded(1),))
    yield Rule((along_of(bias, 0) if last else R, Sharded(0), R), (Sharded(0),))


# Views, permutations and concatenations of the same elements


def _view(node: Node) -> Iterator[Rule]:
    """Yield the rule for partial sums. `rules_for` adds the rules for shards, which need the degree."""
    yield Rule((P,), (P,))


def _moves(
    order: Callable[[Node, int], Sequence[int | None]], sums: bool = True
) -> Callable[[Node], Iterator[Rule]]:
    """Return a function that yields the rules of an operation that has one input and moves its dimensions.

    Args:
        order: Gets the node and the number of its input's dimensions. Returns the position of each input
            dimension in the output, or None if the dimension must not be divided.
        sums: Whether the operation is linear, so that terms of a sum stay terms of a sum.
    """

    def rules(node: Node) -> Iterator[Rule]:
        outputs = made_by(node)
        for d, to in enumerate(order(node, len(shape_of(tensors_of(node)[0])))):
            if to is not None:
                yield Rule((Sharded(d),), (Sharded(to),) * len(outputs))
        if sums and all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in outputs):
            yield Rule((P,), (P,) * len(outputs))

    return rules


def _permuted(node: Node, rank: int) -> list[int | None]:
    """Return the positions of dimensions after `t`, `transpose` or `permute`."""
    order = permutation(node)
    return [order.index(d) for d in range(rank)]


def _but(index: int, default: Any = 0) -> Callable[[Node, int], list[int | None]]:
    """Return an `order` for `_moves`: dimensions stay in place, and some are not divided.

    Args:
        index: The position of the argument that names the dimensions that are not divided.
        default: The value of this argument if a call does not have it.
    """

    def order(node: Node, rank: int) -> list[int | None]:
        along = argument(node, index, default)
        found = (
            {int(d) % rank for d in (along if isinstance(along, list | tuple) else [along])}
            if rank
            else set()
        )
        return [None if d in found else d for d in range(rank)]

    return order


def _split(node: Node) -> Iterator[Rule]:
    """Yield the rules of a split. If outputs are equal runs, shards of runs become shards of the outputs."""
    yield from _moves(_but(2))(node)
    outputs = made_by(node)
    along = int(argument(node, 2, 0)) % len(shape_of(tensors_of(node)[0]))
    if len(outputs) > 1 and len({x.shape[along] for x in outputs if x is not None}) == 1:
        yield Rule((Sharded(along, len(outputs)),), (Sharded(along),) * len(outputs))


def _slice(node: Node) -> Iterator[Rule]:
    """Yield the rules of a slice. The sliced dimension can be divided only if the slice takes all of it."""
    x = tensors_of(node)[0]
    start, stop, step = (argument(node, i, default) for i, default in ((2, None), (3, None), (4, 1)))
    size = shape_of(x)[int(argument(node, 1, 0))]
    if not start and (stop is None or stop >= size) and step == 1:
        yield from _identity(node)
    else:
        yield from _moves(_but(1))(node)


def _without(node: Node, rank: int) -> list[int | None]:
    """Return the positions of the dimensions after an operation that removes one (`select`, `unbind`)."""
    gone = int(argument(node, 1, 0)) % rank
    return [None if d == gone else d - (d > gone) for d in range(rank)]


def _squeezed(node: Node, rank: int) -> list[int | None]:
    """Return the positions of dimensions after `squeeze`. The dimensions that it names are not divided.

    A call without dimensions names all: a shard of any dimension may have size 1, and would be squeezed.
    """
    shape = shape_of(tensors_of(node)[0])
    along = argument(node, 1, list(range(rank)))
    named = (
        {int(d) % rank for d in (along if isinstance(along, list | tuple) else [along])} if rank else set()
    )
    gone = {d for d in named if shape[d] == 1}
    return [None if d in named else d - sum(g < d for g in gone) for d in range(rank)]


def _unsqueezed(node: Node, rank: int) -> list[int | None]:
    """Return the positions of dimensions after `unsqueeze`."""
    at = int(node.args[1]) % (rank + 1)  # type: ignore[arg-type]
    return [d + (d >= at) for d in range(rank)]


def _inserted(node: Node, rank: int) -> list[int | None]:
    """Return the positions of dimensions after `select_backward`, which inserts one."""
    at = int(node.args[2]) % (rank + 1)  # type: ignore[arg-type]
    return [d + (d >= at) for d in range(rank)]


def _expanded(node: Node, rank: int) -> list[int | None]:
    """Return the positions of dimensions after `expand`. Dimensions of size 1 are not divided."""
    shape = shape_of(tensors_of(node)[0])
    more = node.meta["val"].dim() - rank
    return [d + more if shape[d] > 1 else None for d in range(rank)]


def _cat(node: Node) -> Iterator[Rule]:
    """Yield the rules of a concatenation: shards along dimensions that are not concatenated, inputs that
    become runs of the output, and partial sums. If one input has all elements, every dimension can be
    divided."""
    inputs = tensors_of(node)
    shapes = [shape_of(x) for x in inputs]
    rank = max(map(len, shapes))
    along = int(argument(node, 1, 0)) % rank
    # Whether one input has all elements, as in a concatenation with an empty cache of keys.
    single = sum(math.prod(shape) > 0 for shape in shapes) == 1
    for d in range(rank):
        if single and d == along:
            yield Rule(tuple(Sharded(d) if math.prod(shape) else R for shape in shapes), (Sharded(d),))
        elif d != along:  # an empty vector may be among tensors of any rank
            yield Rule(tuple(Sharded(d) if len(shape) == rank else R for shape in shapes), (Sharded(d),))
    if len(set(shapes)) == 1 and len(inputs) > 1:  # the inputs become runs of the output
        yield Rule((Sharded(along),) * len(inputs), (Sharded(along, len(inputs)),))
    yield Rule((P,) * len(inputs), (P,))


def _stack(node: Node) -> Iterator[Rule]:
    """Yield the rules of `stack`. Members do not divide the new dimension."""
    count = len(tensors_of(node))
    rank = len(made_by(node)[0].shape)  # type: ignore[union-attr]
    along = int(argument(node, 1, 0)) % rank
    for d in range(rank - 1):
        yield Rule((Sharded(d),) * count, (Sharded(d + (d >= along)),))
    yield Rule((P,) * count, (P,))


# Sums and norms


def _sum(node: Node) -> Iterator[Rule]:
    """Yield the rules of a sum, a mean or a maximum. A shard along a dimension that is not reduced remains a
    shard. A sum makes a partial sum of a shard along a reduced dimension. Partial sums stay partial sums,
    except in a maximum."""
    (x,) = tensors_of(node)
    rank = len(shape_of(x))
    dims = argument(node, 1) if node.target is not aten.sum.default else None
    gone = {int(d) % rank for d in dims} if dims else set(range(rank))
    kept = bool(argument(node, 2, False)) if node.target is not aten.sum.default else False
    for d in range(rank):
        if d not in gone:
            yield Rule((Sharded(d),), (Sharded(d if kept else d - sum(g < d for g in gone)),))
        elif node.target in SUMS and x.meta["val"].is_floating_point():
            yield Rule((Sharded(d),), (P,))
    if node.target is not aten.amax.default and x.meta["val"].is_floating_point():
        yield Rule((P,), (P,))


def _vector_norm(node: Node) -> Iterator[Rule]:
    """Yield the rules of a norm of vectors. A shard along a dimension that is not reduced remains a shard."""
    rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
    gone = {int(d) % rank for d in argument(node, 2) or range(rank)}
    for d in set(range(rank)) - gone:
        yield Rule((Sharded(d),), (Sharded(d if argument(node, 3, False) else d - sum(g < d for g in gone)),))


def _layer_norm(node: Node) -> Iterator[Rule]:
    """Yield the rules of layer norm. Dimensions that are not normalized can be divided."""
    x, *weights = tensors_of(node)
    rows = len(shape_of(x)) - len(node.args[1])  # type: ignore[arg-type]
    for d in range(rows):
        yield Rule((Sharded(d), *(R for _ in weights)), (Sharded(d),) * 3)


def _layer_norm_backward(node: Node) -> Iterator[Rule]:
    """Yield the rules of the gradients of layer norm. With rows divided, the gradients of the weights are
    terms of a sum."""
    inputs = tensors_of(node)
    rows = len(shape_of(inputs[0])) - len(node.args[2])  # type: ignore[arg-type]
    made = [isinstance(x, torch.Tensor) for x in made_by(node)]
    for d in range(rows):
        outputs: tuple[Placement, ...] = (Sharded(d), P, P)
        held: tuple[Placement, ...] = (*(Sharded(d) for _ in inputs[:4]), *(R for _ in inputs[4:]))
        yield Rule(held, tuple(p if there else None for p, there in zip(outputs, made, strict=True)))


def _rms_norm(node: Node) -> Iterator[Rule]:
    x, *weights = tensors_of(node)
    for d in range(len(shape_of(x)) - len(node.args[1])):  # type: ignore[arg-type]
        yield Rule((Sharded(d), *(R for _ in weights)), (Sharded(d),) * 2)


def _rms_norm_backward(node: Node) -> Iterator[Rule]:
    inputs = tensors_of(node)
    made = [isinstance(x, torch.Tensor) for x in made_by(node)]
    for d in range(len(shape_of(inputs[0])) - len(node.args[2])):  # type: ignore[arg-type]
        held: tuple[Placement, ...] = (*(Sharded(d) for _ in inputs[:3]), *(R for _ in inputs[3:]))
        outputs: tuple[Placement, ...] = (Sharded(d), P)
        yield Rule(held, tuple(p if there else None for p, there in zip(outputs, made, strict=True)))


def _dropped(node: Node) -> Iterator[Rule]:
    """Yield the rules of dropout, along any dimension.

    The mask is drawn for the whole value and then cut (`capture.tensor_sharding.decompositions`).
    """
    (x,) = tensors_of(node)
    for d in range(len(shape_of(x))):
        yield Rule((Sharded(d),), (Sharded(d), Sharded(d)))


def _softmax_backward(node: Node) -> Iterator[Rule]:
    shape = shape_of(tensors_of(node)[0])
    along = int(node.args[2]) % len(shape)  # type: ignore[arg-type]
    for d in range(len(shape)):
        if d != along:
            yield Rule((Sharded(d), Sharded(d)), (Sharded(d),))


def _argmax(node: Node) -> Iterator[Rule]:
    if argument(node, 1) is not None and argument(node, 2, False):
        yield from _moves(_but(1), sums=False)(node)


def _nll(node: Node) -> Iterator[Rule]:
    """Yield the rules of the NLL loss. Rows are divided only if the losses are not reduced over rows."""
    x, _, *weight = tensors_of(node)
    if node.args[3] == 0:
        for d in range(len(shape_of(x))):
            if d != min(1, len(shape_of(x)) - 1):
                yield Rule(
                    (Sharded(d), Sharded(max(0, d - (d > 1))), *(R for _ in weight)),
                    (Sharded(max(0, d - (d > 1))), R),
                )


def _nll_backward(node: Node) -> Iterator[Rule]:
    grad, x, _, *others = tensors_of(node)
    for d in range(len(shape_of(x))):
        if d != min(1, len(shape_of(x)) - 1):
            row = Sharded(max(0, d - (d > 1)))
            yield Rule((row if shape_of(grad) else R, Sharded(d), row, *(R for _ in others)), (Sharded(d),))


# Lookups


def _embedding(node: Node) -> Iterator[Rule]:
    """Yield the rules of `embedding`: shards of the columns of the table, and shards of the index."""
    _, index = tensors_of(node)
    rank = len(shape_of(index))
    yield Rule((Sharded(1), R), (Sharded(rank),))
    for d in range(rank):
        yield Rule((R, Sharded(d)), (Sharded(d),))


def _embedding_backward(node: Node) -> Iterator[Rule]:
    """Yield the rules of the gradient of an embedding's table. Shards of the index make terms of a sum."""
    _, index = tensors_of(node)
    rank = len(shape_of(index))
    yield Rule((Sharded(rank), R), (Sharded(1),))
    if not argument(node, 4, False):
        # If gradients are scaled by the frequency of indices, a shard would count only its own indices.
        for d in range(rank):
            yield Rule((Sharded(d), Sharded(d)), (P,))
        yield Rule((P, R), (P,))


def _identity(node: Node) -> Iterator[Rule]:
    """Yield the rules of an operation that returns its input: shards along each dimension, and partial
    sums."""
    for d in range(len(shape_of(tensors_of(node)[0]))):
        yield Rule((Sharded(d),), (Sharded(d),))
    if node.meta["val"].is_floating_point():
        yield Rule((P,), (P,))


def _filled(node: Node) -> Iterator[Rule]:
    """Yield the rules of an operation that fills a new tensor of a given shape (`new_zeros`). It reads only
    the dtype and the device of its input, so its input may have every placement."""
    yield from (Rule((Sharded(d),), (R,)) for d in range(len(shape_of(tensors_of(node)[0]))))
    yield Rule((P,), (R,))


def _filled_like(node: Node) -> Iterator[Rule]:
    """Yield the rules of an operation that fills a new tensor of its input's shape (`zeros_like`)."""
    yield from (Rule((Sharded(d),), (Sharded(d),)) for d in range(len(shape_of(tensors_of(node)[0]))))
    yield Rule((P,), (R,))


# Operation -> a function that yields its rules, without the rule for whole tensors.
_FAMILIES: dict[Any, Callable[[Node], Iterator[Rule]]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_dropout.default: _dropped,
    aten.native_dropout_backward.default: _pointwise,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.gelu_backward.default: _pointwise,
} | dict.fromkeys(RESHAPES, _view)
_FAMILIES |= dict.fromkeys(ATTENTION, attention_rules)
_FAMILIES |= dict.fromkeys((*SUMS, aten.mean.dim, aten.amax.default), _sum)
_FAMILIES[aten.linalg_vector_norm.default] = _vector_norm
_FAMILIES |= LOOKUPS | RING | CHUNKED
_FAMILIES |= dict.fromkeys(NLL, _nll)
_FAMILIES |= dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _nll_backward)
_FAMILIES |= dict.fromkeys(PERMUTATIONS, _moves(_permuted))
_FAMILIES |= dict.fromkeys((aten.select.int, aten.unbind.int), _moves(_without))
_FAMILIES |= dict.fromkeys(SPLIT, _split)
_FAMILIES |= dict.fromkeys((aten.cumsum.default, aten.flip.default), _moves(_but(1)))
_FAMILIES[aten.slice.Tensor] = _slice
_FAMILIES |= dict.fromkeys(SQUEEZES, _moves(_squeezed))
_FAMILIES |= {aten.slice_backward.default: _moves(_but(2)), aten.select_backward.default: _moves(_inserted)}
_FAMILIES |= dict.fromkeys(SOFTMAXES, _moves(_but(1), sums=False))
_FAMILIES |= dict.fromkeys((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default), _filled)
_FAMILIES |= dict.fromkeys(
    (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), _filled_like
)
_FAMILIES[aten.argmax.default] = _argmax
_FAMILIES |= {
    aten.unsqueeze.default: _moves(_unsqueezed),
    aten.expand.default: _moves(_expanded),
    **dict.fromkeys(COPIES, _identity),
}


_FAMILIES |= dict.fromkeys(
    (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _softmax_backward
)
