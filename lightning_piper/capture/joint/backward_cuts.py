"""Find where a joint graph's forward pass must be cut, so that its backward pass can be cut at each change of
placement. A gradient belongs to the region of its forward operation, so both passes are cut together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.annotate import META_KEY
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import RESHAPES
from lightning_piper.placements.placement_changes import CHANGE

aten = torch.ops.aten
VIEWED = {*RESHAPES, aten.alias.default}


def backward_cuts(
    forward: list[Node], backward: list[Node], shared: Collection[Node]
) -> tuple[dict[Node, set[Node]], dict[Node, int]]:
    """Return which forward nodes must be in a later region than other forward nodes, so that the backward
    pass can be cut at changes of placement.

    If a change is between two gradients, the forward node of the later gradient must be in an earlier region.
    This holds even if the forward pass has no change between the two forward nodes.

    Args:
        forward, backward: the operations of each pass, in the order of the graph.
        shared: forward nodes that belong to no region, such as views of parameters.

    Returns:
        Two dicts, which are empty if the backward pass has no change of placement. The first one: forward
            node -> the nodes whose regions must come before the node's region. The second one: forward node
            -> the number of changes, one after another, between the operations of its gradient.
    """
    found: dict[Node, set[Node]] = {}
    depths: dict[Node, int] = {}
    if not any(node.target is CHANGE for node in backward):
        return found, depths
    first: dict[Any, Node] = {}
    # An operation without a gradient has the sequence number of the operation before it. `setdefault` keeps
    # the first node of each number, so shared nodes come last.
    for node in sorted(forward, key=shared.__contains__):
        first.setdefault(_torch.sequence_number(node), node)

    def differentiated(nodes: list[Node], onward: bool) -> set[Node]:
        """Return the forward nodes to which these gradients belong.

        A node that belongs to no forward node, such as a sum that merges gradients, is replaced by its inputs
        (with `onward`: by its readers).
        """
        made: set[Node] = set()
        stack, seen = list(nodes), set(nodes)
        while stack:
            node = stack.pop()
            own = None if _merges(node) else first.get(_torch.sequence_number(node))
            if own is not None:
                made.add(own)
                continue
            for x in node.users if onward else node.all_input_nodes:
                if x not in seen and x.op == "call_function" and _torch.is_backward(x):
                    seen.add(x)
                    stack.append(x)
        return made

    # the forward nodes of the gradients before and after each change
    for node in backward:
        if node.target is CHANGE:
            for later in differentiated(node.all_input_nodes, onward=False):
                found.setdefault(later, set()).update(differentiated(list(node.users), onward=True) - {later})
    # backward node -> the number of changes from this node on, within the gradient of one forward node
    below: dict[Node, int] = {}
    for node in reversed(backward):
        own = first.get(_torch.sequence_number(node))
        same = [x for x in node.users if x in below and first.get(_torch.sequence_number(x)) is own]
        below[node] = max((below[x] for x in same), default=0) + (node.target is CHANGE and bool(same))
        if own is not None:
            depths[own] = max(depths.get(own, 0), below[node])
    return found, depths


def _merges(node: Node) -> bool:
    """Return whether an untagged node adds gradients of a value that is used several times, or is a view that
    only such additions read."""
    if META_KEY in node.meta.get("custom", {}):
        return False
    return node.target is aten.add.Tensor or (
        node.target in VIEWED and bool(node.users) and all(map(_merges, node.users))
    )
