"""Rules for attention sharded by samples, heads or queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from lightning_piper.ir.values import Shard
from lightning_piper.placements.rule import P, R, Rule, along_of, argument, made_by, shape_of, tensors_of

aten = torch.ops.aten

# Attention on whole sequences is so much work that its heads are divided, even if shards have to move for it.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def attended(node: Node) -> list[Node]:
    """Return queries, keys and values of an attention, or of its backward."""
    inputs = tensors_of(node)
    return inputs[:3] if len(inputs) < 5 else inputs[1:4]


def attention_rules(node: Node) -> Iterator[Rule]:
    """Yield rules for samples, heads and queries, which are independent of each other.

    Each query needs all keys and values. A mask has the same sharding unless it is broadcast. There are no
    rules with dropout, because it draws one mask for the whole attention.
    """
    backward = len(tensors_of(node)) > 4
    if argument(node, 6 if backward else 3, 0.0):
        return
    inputs, outputs = tensors_of(node), made_by(node)
    for d in (1, 0):
        # If there are fewer heads of keys than of queries, both are divided in the same way: each member has
        # a run of them.
        held = [Shard(d) if len(shape_of(x)) > 2 and shape_of(x)[d] > 1 else R for x in inputs]
        yield Rule(tuple(held), (Shard(d),) * len(outputs))
    if argument(node, 7 if backward else 4, False):
        return  # which keys a query may see depends on its position in the sequence
    q = Shard(2)
    mask = [along_of(shape_of(x), len(shape_of(x)) - 2) for x in inputs[6 if backward else 3 :]]
    if backward:  # inputs: gradient of the output, queries, keys, values, output and its log-sum-exp
        yield Rule((q, q, R, R, q, q, *mask), (q, P, P))
    else:
        yield Rule((q, R, R, *mask), (q,) * len(outputs))
