"""Sums, one term at a time.

A sum adds its terms from first to last in the order in which the node lists them, no matter when or where the
terms are made, because floating point sums depend on the order. A term is added as soon as it and all terms
before it are available, so only terms that are available before an earlier term stay in memory.
"""

from __future__ import annotations

from typing import Any

from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import Planning, about, bucket_of
from lightning_piper.ops.communication.bucket import Pack, taken
from lightning_piper.ops.instruction import Read
from lightning_piper.ops.update import Accumulate, Add


class Accumulation:
    """A sum of a node's inputs on one device.

    If the sum has several terms and all terms are outputs of `Pack` nodes, the plan does not run these nodes.
    Instead, it adds the tensors that the nodes would pack directly to the flat sum.

    Attributes:
        terms: The values that are added up.
        total: The slot of the sum so far; -1 before the first term.
    """

    def __init__(self, plan: Planning, node: Node) -> None:
        self._plan, self._node = plan, node
        self._there: set[int] = set()  # indices of the available terms
        self._added = 0  # the terms with indices below this number are added
        self.total = -1
        self.terms = node.inputs
        self._flat: dict[str, Any] = {}  # fields of each `Add` if the sum takes over the work of packs
        makers = [plan.dag.nodes[ref[0]] for ref in node.inputs]
        packs = [maker for maker in makers if isinstance(maker, Pack)]
        if isinstance(node, Accumulate) and len(packs) == len(makers) > 1:
            self.terms = tuple(pack.inputs[0] for pack in packs)
            self._flat = {"bucket": bucket_of(packs[0]), "take": taken(plan, packs[0])}

    def offer(self, index: int) -> None:
        """Note that the term of this index is available, and add all terms whose turn it is. A term may be
        offered more than once."""
        self._there.add(index)
        while self._added < len(self.terms) and self._added in self._there:
            self._add(self._plan.read(self.terms[self._added], self._node))
            self._added += 1

    def complete(self) -> int:
        """Add the missing terms, and return the slot of the sum."""
        for index in range(self._added, len(self.terms)):
            self.offer(index)
        return self.total

    def _add(self, term: Read) -> None:
        """Add a term. After the first term, the slot of this term is the slot of the sum. The second term starts
        a sum in a new slot, and later terms are added to this slot in place."""
        if self._added == 0:
            self.total = term.slot
        elif self._added == 1:
            first, self.total = self.total, self._plan.new_slot(None, "sum", self._node.stream)
            self._plan.emit(
                Add(**about(self._node), reads=(Read(first), term), writes=(self.total,), **self._flat)
            )
        else:
            self._plan.emit(
                Add(**about(self._node), reads=(term,), writes=(self.total,), in_place=True, **self._flat)
            )
