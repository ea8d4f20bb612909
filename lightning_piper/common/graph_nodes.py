"""Copies of fx nodes and graphs.

To warn of symbolic numbers, torch looks into the arguments with which a node is made, which takes half of its time. So
these functions set the arguments afterwards.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def new_node(
    graph: Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> Node:
    """Return a new node of a graph, like `Graph.create_node`."""
    node = graph.create_node(op, target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def copied_node(graph: Graph, node: Node, copies: MutableMapping[Node, Node]) -> Node:
    """Return a copy of a node in another graph, like `Graph.node_copy`.

    Args:
        graph: The graph of the copy.
        copies: Node that the node reads -> its copy.
    """
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    made = new_node(graph, node.op, node.target, args, kwargs, node.name)
    made.meta.update(node.meta)
    return made


def copy_into(graph: Graph, source: Graph, copies: MutableMapping[Node, Node]) -> None:
    """Copy all nodes of a graph into another graph, and add the copies to `copies`. The other graph gets the same
    results."""
    for node in source.nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = copied_node(graph, node, copies)
