"""Norms that a step computes from parameters alone, such as the norm of a weight and its adapter (DoRA).

`propagate` shards a weight as its first reader needs it. So the norms come after the products of their weights::

    a = A.T;  n = norm(W + (eye @ a @ b).T);  y = x @ a @ b;  z = y / n
    ->  a = A.T;  y = x @ a @ b;  n = norm(W + (a @ b).T);  z = y / n
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default


def postpone_norms(graph: Graph, params: Collection[Node]) -> None:
    """Move norms of parameters, and the work for them, to their first readers that read something else. Products
    with an identity matrix in this work become their other factor. The graph is changed in place.

    Args:
        graph: A joint graph before its placements are known.
        params: The placeholders of the parameters.
    """
    alone = set(params)  # the values that are computed from parameters alone
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.target is aten.eye.default or (
            inputs and node.op == "call_function" and alone.issuperset(inputs)
        ):
            alone.add(node)
    if not any(node.target is _NORM for node in alone):
        return
    for node in list(graph.nodes):
        if node in alone and node.target is aten.mm.default and node.args[0].target is aten.eye.default:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
            alone.remove(node)
    around = _around_norms(graph, alone) - set(params)
    for node in reversed(list(graph.nodes)):
        if node in around and node.users and (first := min(node.users)) is not node.next:
            first.prepend(node)


def _around_norms(graph: Graph, alone: Collection[Node]) -> set[Node]:
    """Return the nodes of `alone` that norms read or that read norms, also through other nodes of `alone`."""
    after: set[Node] = set()
    for node in graph.nodes:
        if node in alone and (node.target is _NORM or not after.isdisjoint(node.all_input_nodes)):
            after.add(node)
    before: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in alone and (node.target is _NORM or not before.isdisjoint(node.users)):
            before.add(node)
    return after | before
