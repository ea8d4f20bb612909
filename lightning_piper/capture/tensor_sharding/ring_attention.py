"""Ring attention: each rank keeps its queries, and receives the keys and values of one other rank at a time.

    k, v[S(2)] -> shift -> k, v[S(2)+1] -> attend -\\
    q, k, v[S(2)] -> attend ------------------------+-> merge -> ...

In the placement `S(2)+1` (turn 1), each rank has the shard of the rank before it. Each shift sends shards
directly from the rank that owns them, so no shift waits for another shift. Each shard of the keys is
processed in a separate region while the next shard arrives. A rank receives the shard of turn i after it has
processed the shard of turn i - 2, so it holds at most two shards of other ranks at a time. The backward pass
sends the keys again, and returns their gradients to their owners.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Sharded
from lightning_piper.placements.attention import attended
from lightning_piper.placements.placement_changes import AFTER
from lightning_piper.placements.ring import ATTEND, ATTEND_BACKWARD, MERGE
from lightning_piper.placements.rule import argument, shape_of, tensors_of

if TYPE_CHECKING:
    from lightning_piper.capture.tensor_sharding.decompositions import Decomposer

aten = torch.ops.aten


def ring_sharding(writer: Decomposer, node: Node) -> Sharded | None:
    """Return the shard of the queries, keys and values if an attention can run as ring attention. Return None
    if it cannot, or if the division does not ask for ring attention.

    Ring attention needs queries, keys and values with the same shard of the sequence, and no dropout. A mask
    must be a floating-point mask that is added. Warn, in the forward pass, if the queries are sharded along
    the sequence, but another condition is not met.
    """
    held = [writer.held[x] for x in attended(node)]
    part, backward = held[0], is_backward(node)
    if writer.attention != "ring" or not isinstance(part, Sharded) or part.dim != 2:
        return None
    mask: Any = node.kwargs.get("attn_mask")
    why, fix = None, ""
    if held != [part] * 3:
        why = "its keys and values are not sharded like its queries"
        fix = "If no other attention uses the ring, leave attention= out"
    elif argument(node, 6 if backward else 3, 0.0):
        why, fix = "it has dropout", "To use ring attention, set its dropout to 0"
    elif mask is not None and not mask.meta["val"].is_floating_point():
        why = "its mask is not a floating-point mask that is added"
        fix = "To use ring attention, give a mask with 0 for a position to read, and -inf for any other position"
    if why is None:
        return part
    if not backward:
        warnings.warn(
            f"{own_line(node)}: attention='ring' does not apply to this attention, because {why}. This attention uses "
            f"the default communication instead. {fix} [PIPER-W020]",
            stacklevel=2,
        )
    return None


def attend(writer: Decomposer, node: Node, part: Sharded) -> tuple[Node, Node]:
    """Write attention to the keys of one rank after another, and merge the results. Return the output and the
    logsumexp, which are the results of `node`.

    Args:
        writer: replaces `node`.
        part: the shard of the queries, keys and values.
    """
    q, k, v = attended(node)
    about = _about(writer, node, 4, part)
    own = [_dense(writer, x) for x in (k, v)]
    done: list[Node] = []
    out = lse = q
    for turn in range(writer.degree):
        keys = _arrived(writer, own, part, turn, done[turn - 2] if turn > 1 else None)
        made = writer(ATTEND, q, *keys, *_ids(writer, q, k, part, turn), *about, turn)
        made.meta[AFTER] = {done[-1] if done else k: 1}
        found, sums = (writer(operator.getitem, made, i) for i in range(2))
        if turn:
            made = writer(MERGE, out, lse, found, sums)
            found, sums = (writer(operator.getitem, made, i) for i in range(2))
        out, lse = found, sums
        done.append(made)
    out, lse = _cast(writer, out, q.meta["val"].dtype), writer(aten.alias.default, lse)
    out.meta[AFTER] = lse.meta[AFTER] = {done[-1]: 1}
    return out, lse


def attend_backward(writer: Decomposer, node: Node, part: Sharded) -> tuple[Node, ...]:
    """Write the gradients of `attend`, in the same order of shards. Return the gradients of queries, keys and
    values, which are the results of `node`.

    A rank that computes with the keys of another rank returns the gradients of these keys to their owner. The
    owner adds them only after the next shard is done, so that they have time to arrive.
    """
    grad, q, k, v, *kept = tensors_of(node)[:6]
    out, lse = (_itself(x) for x in kept)  # the saved values, without the copies of the backward pass
    node.meta["seq_nr"] = (node.name,)  # `AFTER` alone decides the position of the node
    about = _about(writer, node, 7, part)
    own = [_dense(writer, x) for x in (k, v)]
    dtype = torch.promote_types(q.meta["val"].dtype, torch.float32)
    done: list[Node] = [grad]
    total: list[Node] = []
    for turn in range(writer.degree):
        # Send the keys again, because the forward pass has freed its copies.
        keys = _arrived(writer, own, part, turn, done[max(turn - 1, 0)])
        made = writer(
            ATTEND_BACKWARD, grad, q, *keys, out, lse, *_ids(writer, q, k, part, turn), *about, turn
        )
        made.meta[AFTER] = {done[-1]: 1}
        done.append(made)
        term, *terms = (writer(operator.getitem, made, i) for i in range(3))
        back = [_cast(writer, _turned(writer, x, part, 0), dtype) for x in terms]
        for x in back if turn else ():
            x.meta[AFTER] = {made: min(2, writer.degree - turn)}
        total = (
            [writer(aten.add.Tensor, x, y) for x, y in zip(total, (term, *back), strict=True)]
            if turn
            else [term, *back]
        )
    of_all = zip(total, (q, k, v), strict=True)
    return tuple(_cast(writer, x, like.meta["val"].dtype) for x, like in of_all)


def _about(writer: Decomposer, node: Node, causal: int, part: Sharded) -> tuple[Any, ...]:
    """Return further arguments of `ATTEND` and `ATTEND_BACKWARD`: the mask or None, whether the attention is
    causal, the scale or None, the degree, and the number of blocks of a shard.

    Args:
        causal: the index of the argument `is_causal` of `node`.
    """
    mask, scale = (node.kwargs.get(name) for name in ("attn_mask", "scale"))
    return mask, bool(argument(node, causal, False)), scale, writer.degree, part.blocks


def _ids(writer: Decomposer, q: Node, k: Node, part: Sharded, turn: int) -> tuple[Node, Node]:
    """Return the positions of the rank's queries, and the positions of the keys that it has in turn `turn`, as
    two vectors of indices."""
    return writer.ids(shape_of(q)[2], q, part), writer.ids(shape_of(k)[2], k, replace(part, turn=turn))


def _arrived(
    writer: Decomposer, own: Sequence[Node], part: Sharded, turn: int, when: Node | None
) -> list[Node]:
    """Return the keys and values of another rank.

    Args:
        own: The keys and values of the rank itself.
        part: The placement of `own`.
        turn: How many places before this rank the other rank is. For 0, return `own`.
        when: The node in whose region the keys and values are sent. If None, they are sent immediately.
    """
    if turn == 0:
        return list(own)
    sent = list(own) if when is None else [writer(aten.alias.default, x) for x in own]
    for x in sent if when is not None else ():
        x.meta[AFTER] = {when: 0}
    return [_turned(writer, x, part, turn) for x in sent]


def _dense(writer: Decomposer, x: Node) -> Node:
    """Return a contiguous copy of a value, or the value itself if it is contiguous. All shifts of a value,
    forward and backward, send the same copy."""
    if x not in writer.dense:
        dense = x.meta["val"].is_contiguous()
        writer.dense[x] = x if dense else writer(aten.clone.default, x, memory_format=torch.contiguous_format)
    return writer.dense[x]


def _turned(writer: Decomposer, x: Node, part: Sharded, turn: int) -> Node:
    """Return `x` shifted so that each rank has the shard of turn `turn`. With `turn` 0, the rank has its own
    shard."""
    wanted = replace(part, turn=turn)
    return x if writer.held[x] == wanted else writer.changed(x, wanted)


def _cast(writer: Decomposer, x: Node, dtype: torch.dtype) -> Node:
    """Return a new node with `x` in this dtype: a conversion, or an alias if it already has this dtype."""
    if x.meta["val"].dtype == dtype:
        return writer(aten.alias.default, x)
    return writer(aten._to_copy.default, x, dtype=dtype)


def _itself(x: Node) -> Node:
    """Return the value that the backward pass has copied to `x`, or `x` itself if it is not such a copy."""
    while x.target in (aten.detach.default, aten.alias.default) and _torch.is_backward(x):
        (x,) = x.all_input_nodes
    return x


def is_backward(node: Node) -> bool:
    """Return whether an attention operation is a backward one, whose first input is a gradient."""
    return tensors_of(node)[0] is not attended(node)[0]
