"""Operations on the scores of a linear layer, `hidden @ weight.T + bias`, that never hold all scores at once::

    target's score, sum = chunked_scores(hidden, weight, bias, target)   the loss of a row is sum - target's score

Each row of `hidden` has one score for each class, and `sum` is the logarithm of the sum of the exponentials of
its scores. The operations compute the scores of a chunk of rows, reduce them, and drop them. The backward
operation computes the scores again.

If ranks shard the classes, `chunked_scores_part` and the backward operation get `ids`: the classes of a rank's
shard, one after another. A target of another rank gives zero, so the ranks' results are terms of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.rule import P, R, Rule, made_by, shape_of, tensors_of

# A chunk has as many rows as have this many scores, which take 64 MiB in float32, but at least `ROWS`, because a
# product of few rows is slow. A call can give another number of rows.
SCORES, ROWS = 1 << 24, 512


@torch.library.custom_op("lightning_piper::chunked_scores", mutates_args=())
def _chunked_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return for each row the score of its target, and the logarithm of the sum of the exponentials of its
    scores, both in float32 or a wider dtype.

    Args:
        hidden: `[..., in]`.
        weight: `[classes, in]`.
        bias: `[classes]`.
        target: `[...]`: a class for each row.
        chunk: The number of rows whose scores exist at once; 0: see `SCORES`.
    """
    picked, sums = _new(hidden, target.shape), _new(hidden, target.shape)
    index = target.reshape(-1, 1)
    for rows in _ranges(target.numel(), len(weight), chunk):
        scores = _scores(hidden, weight, bias, rows)
        picked.view(-1)[rows] = scores.gather(1, index[rows]).squeeze(1)
        sums.view(-1)[rows] = _log_sum(scores)
        del scores  # before the scores of the next chunk exist
    return picked, sums


@_chunked_scores.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    return _new(hidden, target.shape), _new(hidden, target.shape)


@torch.library.custom_op("lightning_piper::chunked_scores_part", mutates_args=())
def _chunked_scores_part(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor, chunk: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Return the results of `chunked_scores` for shards of the classes: the scores of the targets, and
    `[shards, ...]`, the logarithms of the sums over each shard.

    Args:
        weight: `[shards, classes of a shard, in]`.
        bias, ids: `[shards * classes of a shard]`.
        classes: The number of classes of all ranks. Another target is an error.
    """
    picked, sums = _new(hidden, target.shape).zero_(), _new(hidden, (len(weight), *target.shape))
    size = weight.shape[1]
    for index, part in enumerate(weight):
        own = slice(index * size, (index + 1) * size)
        local, mine = _local(target, ids[own], classes)
        for rows in _ranges(target.numel(), size, chunk):
            scores = _scores(hidden, part, None if bias is None else bias[own], rows)
            picked.view(-1)[rows] += scores.gather(1, local[rows]).mul_(mine[rows]).squeeze(1)
            sums[index].view(-1)[rows] = _log_sum(scores)
            del scores
    return picked, sums


@_chunked_scores_part.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor, chunk: int, classes: int
) -> tuple[Tensor, Tensor]:
    return _new(hidden, target.shape), _new(hidden, (weight.shape[0], *target.shape))


@torch.library.custom_op("lightning_piper::chunked_scores_backward", mutates_args=())
def _chunked_scores_backward(
    of_picked: Tensor,
    of_sums: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    sums: Tensor,
    ids: Tensor | None,
    chunk: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `weight` and `bias`. A gradient that is not wanted has no elements.

    Args:
        of_picked, of_sums: `[...]`: the gradients of the two results of `chunked_scores`.
        sums: `[...]`: the second result of `chunked_scores`.
        ids: `[classes]`: the classes of `weight`; None: all classes.
        wanted: Whether each of the three gradients is wanted.
    """
    rows_of, index = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1, 1)
    of_picked, of_sums, sums = (x.reshape(-1, 1) for x in (of_picked, of_sums, sums))
    if ids is not None:
        index, mine = _local(target, ids)
        of_picked = of_picked * mine
    into = hidden.new_empty(hidden.shape if wanted[0] else (0,))
    of_weight = _new(weight, weight.shape if wanted[1] else (0,)).zero_()
    of_bias = _new(weight, weight.shape[:1] if wanted[2] else (0,)).zero_()
    for rows in _ranges(len(index), len(weight), chunk):
        grad = _scores(hidden, weight, bias, rows).sub_(sums[rows]).exp_().mul_(of_sums[rows])
        grad.scatter_add_(1, index[rows], of_picked[rows])
        if wanted[2]:
            of_bias += grad.sum(0)
        grad = grad.to(weight.dtype)
        if wanted[0]:
            into.view(-1, hidden.shape[-1])[rows] = grad @ weight
        if wanted[1] and of_weight.dtype == grad.dtype:
            of_weight.addmm_(grad.t(), rows_of[rows])
        elif wanted[1]:  # the sum over chunks is taken in float32, like the sum over rows in one product
            of_weight += grad.t() @ rows_of[rows]
        del grad
    return into, of_weight.to(weight.dtype), of_bias.to(weight.dtype)


@_chunked_scores_backward.register_fake
def _(
    of_picked: Tensor,
    of_sums: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    sums: Tensor,
    ids: Tensor | None,
    chunk: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wanted[2] else (0,)),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, target, chunk = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[1])
    ctx.chunk = chunk


def _backward(ctx: Any, of_picked: Tensor, of_sums: Tensor) -> tuple[Any, ...]:
    """Return the gradients of hidden, weight and bias, each None if it is not needed."""
    wanted = list(ctx.needs_input_grad[:3])
    hidden, weight, bias, target, sums = ctx.saved_tensors
    found = SCORES_BACKWARD(of_picked, of_sums, hidden, weight, bias, target, sums, None, ctx.chunk, wanted)
    return (*(x if w else None for x, w in zip(found, wanted, strict=True)), None, None)


_chunked_scores.register_autograd(_backward, setup_context=_remember)
SCORES_OF = torch.ops.lightning_piper.chunked_scores.default
SCORES_OF_PART = torch.ops.lightning_piper.chunked_scores_part.default
SCORES_BACKWARD = torch.ops.lightning_piper.chunked_scores_backward.default


def _new(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new tensor in the dtype of `like`, or in float32 if that is wider."""
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _ranges(count: int, classes: int, chunk: int) -> Iterator[slice]:
    """Iterate over the chunks of `count` rows."""
    size = _rows_of(classes, chunk)
    yield from (slice(start, min(start + size, count)) for start in range(0, count, size))


def _rows_of(classes: int, chunk: int) -> int:
    """Return the number of rows of a chunk."""
    return chunk or max(ROWS, SCORES // classes)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of scores: the dtype of the weight, or float32 if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """Return the scores of some rows, in float32 or a wider dtype."""
    found = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1])[rows], weight, bias)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _log_sum(scores: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row, and overwrite `scores`."""
    largest = scores.amax(1, keepdim=True)
    return scores.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))


def score_traffic(target: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of scores that the products in a call of an operation in `CHUNKED` read and write, and the
    bytes of the other operations. Each operation reads or writes all scores once."""
    hidden, weight = args[2:4] if target is SCORES_BACKWARD else args[:2]
    nbytes = int(hidden.shape[:-1].numel() * weight.shape[:-1].numel() * _wide(weight).itemsize)
    if target is not SCORES_BACKWARD:
        return nbytes, 5 * nbytes  # the scores of the targets, and four steps of the logarithm of the sum
    of_hidden, of_weight, of_bias = args[-1]
    return (1 + of_hidden + of_weight) * nbytes, (4 + of_bias) * nbytes  # four steps of the scores' gradient


def workspace(target: Any, args: Sequence[Any]) -> int:
    """Return the largest number of bytes of temporary tensors in a call of an operation in `CHUNKED`.

    They are the scores of a chunk. If scores have a wider dtype than the weight, the backward operation also has a
    sum of the weight's gradient.
    """
    backward = target is SCORES_BACKWARD
    hidden, weight = args[2:4] if backward else args[:2]
    chunk, classes = args[8] if backward else args[5 if target is SCORES_OF_PART else 4], weight.shape[-2]
    rows = min(hidden.shape[:-1].numel(), _rows_of(classes, chunk))
    wide, narrow = _wide(weight).itemsize, weight.dtype.itemsize
    each = wide if wide == narrow else wide + narrow  # a product, and its conversion
    summed = weight.numel() * each if backward and args[-1][1] and wide != narrow else 0
    return int(rows * classes * each + summed)


def _local(target: Tensor, ids: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Return two columns: the position of each target in `ids`, or 0 if it is not there; and whether it is
    there. `ids` is ascending without gaps.

    With `classes`, a target that is not one of that many classes gets a position after `ids`, so that torch
    raises an error for it, as without shards.
    """
    index = target.reshape(-1, 1)
    mine = (index >= ids[0]) & (index <= ids[-1])
    local = torch.where(mine, index - ids[0], 0)
    return local if classes is None else local.masked_fill((index < 0) | (index >= classes), len(ids)), mine


# Rules. Rows may be sharded along each of their dimensions, and classes in contiguous shards.


def _rules(node: Node) -> Iterator[Rule]:
    _, *params, target = tensors_of(node)
    for d in range(len(shape_of(target))):
        yield Rule((Sharded(d), *(R for _ in params), Sharded(d)), (Sharded(d), Sharded(d)))


def _part_rules(node: Node) -> Iterator[Rule]:
    _, *params, target, _ = tensors_of(node)
    yield Rule((R, *(Sharded(0) for _ in params), R, Sharded(0)), (P, Sharded(0)))
    for d in range(len(shape_of(target))):
        yield Rule((Sharded(d), *(R for _ in params), Sharded(d), R), (Sharded(d), Sharded(d + 1)))


def _backward_rules(node: Node) -> Iterator[Rule]:
    rank = len(shape_of(tensors_of(node)[0]))
    made = [x is not None and x.shape[0] > 0 for x in made_by(node)]
    has_ids = node.args[7] is not None
    params: list[Placement] = [R] * (1 + (node.args[4] is not None))

    def outputs(*held: Placement) -> tuple[Placement, ...]:
        return tuple(p if there else R for p, there in zip(held, made, strict=True))

    for d in range(rank):
        rows: Placement = Sharded(d)
        held = (rows, rows, rows, *params, rows, rows, *(R for _ in range(has_ids)))
        yield Rule(held, outputs(rows, P, P))
    if has_ids:
        shards: list[Placement] = [Sharded(0)] * len(params)
        yield Rule((R, R, R, *shards, R, R, Sharded(0)), outputs(P, Sharded(0), Sharded(0)))


CHUNKED: dict[Any, Callable[[Node], Iterator[Rule]]] = {
    SCORES_OF: _rules,
    SCORES_OF_PART: _part_rules,
    SCORES_BACKWARD: _backward_rules,
}


def with_classes(target: Any, args: Sequence[Any]) -> list[Any]:
    """Return arguments of an operation in `CHUNKED` that belong together.

    Targets become classes, `ids` become all classes, and sums of exponentials become the sums of the scores. The
    other arguments stay.
    """
    found = list(args)
    first = 2 if target is SCORES_BACKWARD else 0
    hidden, weight, bias, index = found[first : first + 4]
    classes = weight.shape[:-1].numel()
    found[first + 3] = index % classes
    if target is SCORES_OF_PART:
        found[4] = torch.arange(classes)
    if target is SCORES_BACKWARD:
        found[6] = SCORES_OF(hidden, weight, bias, found[5], 0)[1]
        found[7] = None if found[7] is None else torch.arange(classes)
    return found
