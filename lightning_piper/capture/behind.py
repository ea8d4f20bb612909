"""Where a joint graph is cut on the way forth, so that it can be cut on the way back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.annotate import META_KEY
from lightning_piper.capture import _torch
from lightning_piper.placements.changing import CHANGE

aten = torch.ops.aten
VIEWED = {aten.view.default, aten._unsafe_view.default, aten.alias.default}


def behind_changes(
    forward: list[Node], backward: list[Node], shared: Collection[Node]
) -> tuple[dict[Node, set[Node]], dict[Node, int]]:
    """Forward nodes -> those that they have to be in a later region than: what comes behind a change on the way back comes before
    it on the way forth, also where nothing changes there. And those among whose gradients there are changes, how many in a row."""
    found: dict[Node, set[Node]] = {}
    depths: dict[Node, int] = {}
    if not any(node.target is CHANGE for node in backward):
        return found, depths
    first: dict[Any, Node] = {}
    for node in sorted(forward, key=shared.__contains__):  # operations without gradient repeat the number before
        first.setdefault(_torch.sequence_number(node), node)

    def differentiated(nodes: list[Node], onward: bool) -> set[Node]:
        """Whose gradients these are, or, of additions that merge gradients, those of what leads there (or follows)."""
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

    for node in backward:
        if node.target is CHANGE:
            for later in differentiated(node.all_input_nodes, onward=False):
                found.setdefault(later, set()).update(differentiated(list(node.users), onward=True) - {later})
    below: dict[Node, int] = {}
    for node in reversed(backward):
        own = first.get(_torch.sequence_number(node))
        same = [x for x in node.users if x in below and first.get(_torch.sequence_number(x)) is own]
        below[node] = max((below[x] for x in same), default=0) + (node.target is CHANGE and bool(same))
        if own is not None:
            depths[own] = max(depths.get(own, 0), below[node])
    return found, depths


def _merges(node: Node) -> bool:
    """Does it add gradients of a value that is used twice, or is it a view of one of them?"""
    if META_KEY in node.meta.get("custom", {}):
        return False
    return node.target is aten.add.Tensor or (node.target in VIEWED and bool(node.users) and all(map(_merges, node.users)))
