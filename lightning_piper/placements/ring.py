"""Ring attention: queries of one part attend to keys of one part, and results of several parts are merged.

See Liu et al., Ring Attention, 2023. The operations::

    out, lse = attend(q, k, v, query_ids, key_ids, mask, causal, scale, parts, runs, turn)
    out, lse = merge(out, lse, another out, another lse)
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, query_ids, ...)  # and the arguments of attend

On whole sequences, the queries of part r of `parts` (each consisting of `runs` runs) attend only to the keys
of part r - `turn` (modulo `parts`). A member of an axis has one part of the queries and one part of the keys,
so it runs the operation with `parts` 1 and `turn` 0. `*_ids` are the positions of queries and keys in the
sequence. They define a causal mask, and the operations skip keys that no query sees. `lse` is the log-sum-exp
of the scores, which normalizes the weights. It is minus infinity for a query that sees no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.rule import R, Rule, along_of, shape_of, tensors_of

aten = torch.ops.aten


@torch.library.custom_op("lightning_piper::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor,
    key_ids: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    parts: int,
    runs: int,
    turn: int,
) -> tuple[Tensor, Tensor]:
    """Attend to keys: q [n, heads, length, size], k and v with as many heads or fewer.

    The ids are [length]. The mask [..., length, all keys] is added to the scores.

    Returns:
        The output, and `lse` [n, heads, length], both in float32 or a wider dtype.
    """
    of_queries, of_keys = Sharded(2, runs), Sharded(2, runs, turn)
    columns: Iterator[Any] = zip(
        of_queries.parts(q, parts),
        of_keys.parts(k, parts),
        of_keys.parts(v, parts),
        _ids(query_ids, of_queries, parts),
        _ids(key_ids, of_keys, parts),
        _rows(mask, of_queries, parts),
        strict=True,
    )
    found = [_attend_part(causal, scale, *column) for column in columns]
    out, lse = (of_queries.joined(each) for each in zip(*found, strict=True))
    return out, lse


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor,
    key_ids: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    parts: int,
    runs: int,
    turn: int,
) -> tuple[Tensor, Tensor]:
    dtype = _precise(q)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("lightning_piper::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_ids: Tensor,
    key_ids: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    parts: int,
    runs: int,
    turn: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the attention to the keys `k`. `out` and `lse` are the results for all keys.

    Returns:
        The term of the queries' gradient that comes from these keys, in float32 or a wider dtype, and the
        gradients of `k` and `v`.
    """
    of_queries, of_keys = Sharded(2, runs), Sharded(2, runs, turn)
    columns: Iterator[Any] = zip(
        *(of_queries.parts(x, parts) for x in (grad, q, out, lse)),
        *(of_keys.parts(x, parts) for x in (k, v)),
        _ids(query_ids, of_queries, parts),
        _ids(key_ids, of_keys, parts),
        _rows(mask, of_queries, parts),
        strict=True,
    )
    found = [_attend_part_backward(causal, scale, *column) for column in columns]
    dq, dk, dv = zip(*found, strict=True)
    return of_queries.joined(dq), of_keys.joined(dk), of_keys.joined(dv)


@_attend_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_ids: Tensor,
    key_ids: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    parts: int,
    runs: int,
    turn: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=_precise(q)), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("lightning_piper::merge", mutates_args=())
def _merge(out: Tensor, lse: Tensor, more: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of queries to two sets of keys: `out` and `more`, whose sums of exponentials have
    the logarithms `lse` and `other`.

    The weight of each set is its sum of exponentials.
    """
    one, two, total = _shares(lse, other)
    return out * one.unsqueeze(-1) + more * two.unsqueeze(-1), total


@_merge.register_fake
def _(out: Tensor, lse: Tensor, more: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


ATTEND = torch.ops.lightning_piper.attend.default
ATTEND_BACKWARD = torch.ops.lightning_piper.attend_backward.default
MERGE = torch.ops.lightning_piper.merge.default
# Operation -> the position of its argument `parts`. The arguments `runs` and `turn` follow.
PARTS = {ATTEND: 8, ATTEND_BACKWARD: 11}
# Operation -> the indices, among its tensor inputs, of `query_ids` and `key_ids`.
NUMBERS = {ATTEND: (3, 4), ATTEND_BACKWARD: (6, 7)}


def work(query_ids: Sequence[int], key_ids: Sequence[int], causal: bool) -> int:
    """Return the number of pairs of a query and a key for which `attend` computes a score."""
    return sum(
        (stop - start) * seen for start, stop, seen, _ in _runs(list(query_ids), list(key_ids), causal)
    )


def _runs(queries: list[int], keys: list[int], causal: bool) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the runs of consecutive queries that see keys. The keys must be in ascending order.

    A run is (start, stop, number of keys that its last query sees, whether some of its queries see fewer
    keys). Without `causal`, all queries are one run.
    """
    if not causal:
        yield 0, len(queries), len(keys), False
        return
    starts = [0, *(i for i in range(1, len(queries)) if queries[i] != queries[i - 1] + 1)]
    for start, stop in zip(starts, [*starts[1:], len(queries)], strict=True):
        seen = sum(key <= queries[stop - 1] for key in keys)
        if seen:
            yield start, stop, seen, keys[seen - 1] > queries[start]


def _shares(lse: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the share of each of two sums of exponentials in their total, and the logarithm of the total.

    If both sums are empty, both shares are 0.
    """
    total = torch.logaddexp(lse, other)
    return (lse - total).exp().nan_to_num(0), (other - total).exp().nan_to_num(0), total


def _attend_part(
    causal: bool,
    scale: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output and `lse` of attention of some queries to some keys, whose positions are `queries` and
    `keys`."""
    dtype = _precise(q)
    out, lse = q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    for start, stop, seen, some in _runs(queries.tolist(), keys.tolist(), causal):
        hidden = _hidden(mask, queries[start:stop], keys[:seen], slice(start, stop), some, q.dtype)
        about = {"attn_mask": hidden, "scale": scale}
        made, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], 0.0, False, **about
        )
        out[:, :, start:stop] = made
        lse[:, :, start:stop] = sums if hidden is None else sums.masked_fill(_blind(hidden, sums), -math.inf)
    return out, lse


def _attend_part_backward(
    causal: bool,
    scale: float | None,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values for attention of some queries to some keys, whose
    positions are `queries` and `keys`."""
    dtype = _precise(q)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    # With minus infinity, the weights of a query that sees no key would be NaN. With 0, the weights are 0.
    lse = lse.masked_fill(lse == -math.inf, 0)
    for start, stop, seen, some in _runs(queries.tolist(), keys.tolist(), causal):
        hidden = _hidden(mask, queries[start:stop], keys[:seen], slice(start, stop), some, q.dtype)
        rows, about = slice(start, stop), {"attn_mask": hidden, "scale": scale}
        of_queries, of_keys, of_values = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, :seen],
            v[:, :, :seen],
            out[:, :, rows],
            lse[:, :, rows],
            0.0,
            False,
            **about,
        )
        dq[:, :, rows] = of_queries
        dk[:, :, :seen] += of_keys
        dv[:, :, :seen] += of_values
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _hidden(
    mask: Tensor | None, queries: Tensor, keys: Tensor, rows: slice, causal: bool, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask to add to the scores of these queries and keys; None if they need no mask.

    Args:
        mask: The user's mask. Its rows are the queries of a part, its columns all keys of the sequence.
        queries, keys: Positions in the sequence.
        rows: The rows of `mask` for these queries.
        causal: Whether to hide keys that come after a query.
    """
    found = None
    if mask is not None:
        found = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        found = found.index_select(-1, keys) if mask.shape[-1] > 1 else found
    if causal:
        later = torch.zeros(len(queries), len(keys), dtype=dtype).masked_fill_(
            keys > queries[:, None], -math.inf
        )
        found = later if found is None else found + later
    return None if found is None else found.expand(*found.shape[:-2], len(queries), len(keys))


def _blind(hidden: Tensor, like: Tensor) -> Tensor:
    """Return a mask, in the shape of `like`, of the queries that see no key. The kernel does not return minus
    infinity as their log-sum-exp."""
    return (hidden == -math.inf).all(-1).expand(like.shape)


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _ids(ids: Tensor, placement: Sharded, parts: int) -> list[Tensor]:
    """Return the positions in the sequence of each of `parts` parts."""
    return Sharded(0, placement.blocks, placement.turn).parts(ids, parts)


def _rows(mask: Tensor | None, placement: Sharded, parts: int) -> Sequence[Tensor | None]:
    """Return the rows of a mask for the queries of each part. A mask with one row serves all queries, and a
    missing mask stays None."""
    if mask is None or mask.shape[-2] == 1:
        return [mask] * parts
    return Sharded(mask.dim() - 2, placement.blocks).parts(mask, parts)


# Rules


def _attend_rules(node: Node) -> Iterator[Rule]:
    """Yield the rules of `ATTEND` or `ATTEND_BACKWARD`: shards of the sequences, of the heads, or of the
    samples."""
    at = PARTS[node.target]  # type: ignore[index]
    runs, turn = (int(x) for x in node.args[at + 1 : at + 3])  # type: ignore[arg-type]
    q, k = Sharded(2, runs), Sharded(2, runs, turn)
    ids: tuple[Placement, ...] = (Sharded(0, runs), Sharded(0, runs, turn))
    masks = [shape_of(x) for x in tensors_of(node)[NUMBERS[node.target][1] + 1 :]]  # type: ignore[index]
    rows = tuple(Sharded(len(s) - 2, runs) if along_of(s, len(s) - 2) != R else R for s in masks)
    if node.target is ATTEND:
        yield Rule((q, k, k, *ids, *rows), (q, q))
    else:
        yield Rule((q, q, k, k, q, q, *ids, *rows), (q, k, k))
    count = NUMBERS[node.target][0]  # type: ignore[index]
    for d in (1, 0):  # heads and samples are independent of each other
        mask = tuple(along_of(s, len(s) - 4 + d) for s in masks)
        yield Rule(
            ((Sharded(d),) * count + (R, R, *mask)), (Sharded(d),) * (2 if node.target is ATTEND else 3)
        )


def _merge_rules(node: Node) -> Iterator[Rule]:
    for d in range(len(shape_of(tensors_of(node)[1]))):
        yield Rule((Sharded(d),) * 4, (Sharded(d),) * 2)


RING: dict[Any, Callable[[Node], Iterator[Rule]]] = {
    ATTEND: _attend_rules,
    ATTEND_BACKWARD: _attend_rules,
    MERGE: _merge_rules,
}
