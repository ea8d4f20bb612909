"""Rules for attention sharded by samples, heads or queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from lightning_piper.ir.values import Sharded
from lightning_piper.placements.rule import P, R, Rule, along_of, argument, made_by, shape_of, tensors_of

aten = torch.ops.aten

# The operations of attention. Attention on whole sequences is much work. If one of its inputs is sharded,
# Piper therefore divides its heads or queries, even if shards have to move.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def attended(node: Node) -> list[Node]:
    """Return the queries, keys and values among the inputs of an operation in `ATTENTION`."""
    inputs = tensors_of(node)
    return inputs[:3] if len(inputs) < 5 else inputs[1:4]


def attention_rules(node: Node) -> Iterator[Rule]:
    """Yield the rules that divide samples, heads or queries. Attention computes each of them separately.

    Each query needs all keys and values. A mask has the same sharding as the queries, unless it is broadcast.
    Attention with dropout has no rules, because it draws one mask for the whole attention. Causal attention
    (`is_causal`) has no rule that divides queries.
    """
    backward = len(tensors_of(node)) > 4
    if argument(node, 6 if backward else 3, 0.0):
        return
    inputs, outputs = tensors_of(node), made_by(node)
    for d in (1, 0):
        # If there are fewer heads of keys than of queries, both are divided in the same way: each member has
        # a run of them.
        held = [Sharded(d) if len(shape_of(x)) > 2 and shape_of(x)[d] > 1 else R for x in inputs]
        yield Rule(tuple(held), (Sharded(d),) * len(outputs))
    if argument(node, 7 if backward else 4, False):
        return  # causal: the keys that a query sees depend on its position, which a shard does not have
    q = Sharded(2)
    mask = [along_of(shape_of(x), len(shape_of(x)) - 2) for x in inputs[6 if backward else 3 :]]
    if backward:  # inputs: gradient of the output, queries, keys, values, output and its log-sum-exp
        yield Rule((q, q, R, R, q, q, *mask), (q, P, P))
    else:
        yield Rule((q, R, R, *mask), (q,) * len(outputs))
