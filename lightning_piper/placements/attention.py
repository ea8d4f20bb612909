"""Attention of parts: of samples, of heads, or of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from lightning_piper.ir.values import Shard
from lightning_piper.placements.rule import P, R, Rule, along_of, argument, made_by, shape_of, tensors_of

aten = torch.ops.aten

# On whole sequences there is so much to do that their heads are divided, also where parts have to move for it.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def attended(node: Node) -> list[Node]:
    """Queries, keys and values of an attention, or of its gradient."""
    inputs = tensors_of(node)
    return inputs[:3] if len(inputs) < 5 else inputs[1:4]


def attention_rules(node: Node) -> Iterator[Rule]:
    """Samples and heads are independent of each other, and so are queries, each of which needs all keys and values; a mask follows
    where it is not broadcast. Dropout draws for all at once."""
    backward = len(tensors_of(node)) > 4
    if argument(node, 6 if backward else 3, 0.0):
        return
    inputs, outputs = tensors_of(node), made_by(node)
    for d in (1, 0):
        # Fewer heads of keys than of queries are divided alike: each has a run of them.
        held = [Shard(d) if len(shape_of(x)) > 2 and shape_of(x)[d] > 1 else R for x in inputs]
        yield Rule(tuple(held), (Shard(d),) * len(outputs))
    if argument(node, 7 if backward else 4, False):
        return  # which keys a query may see depends on where it stands
    q = Shard(2)
    mask = [along_of(shape_of(x), len(shape_of(x)) - 2) for x in inputs[6 if backward else 3 :]]
    if backward:  # of the gradient of the result, of queries, keys, values, the result and its norm
        yield Rule((q, q, R, R, q, q, *mask), (q, P, P))
    else:
        yield Rule((q, R, R, *mask), (q,) * len(outputs))
