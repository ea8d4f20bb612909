"""Numbers that identify equal computations in a graph: the same operations on the same inputs.

`loss_terms.py` uses them to see that two sums over the batch are the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


class ComputationKeys:
    """A numbering of the computations of one graph, which gives equal computations the same number.

    Placeholders and constants are equal only to themselves. Random operations on equal inputs count as equal.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._found: dict[Node, int] = {}

    def number_of(self, description: Any) -> int:
        """Return the number of a hashable description of a computation. A new description gets a new number."""
        return self._numbers.setdefault(description, len(self._numbers))

    def of(self, node: Node) -> int:
        """Return the number of a node's computation."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [x for x in top.all_input_nodes if x not in self._found]
            if not missing:
                stack.pop()
                if top not in self._found:
                    self._found[top] = self._of_operation(top)
            stack += missing
        return self._found[node]

    def _of_operation(self, node: Node) -> int:
        if node.op != "call_function":
            return self.number_of((node.op, node.name))
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: _ComputationKey(self._found[x]))
        return self.number_of((node.target, repr(arguments)))


class _ComputationKey(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"
