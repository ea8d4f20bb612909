"""The results of a traced graph, while its loss and logged values are split into terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.regions import Output
from lightning_piper.ir.values import Kind


class GraphResults:
    """A copy of the results of a traced graph, each with its descriptor. `write` lets the graph return the
    copy.

    Args:
        traced: The traced graph.

    Attributes:
        nodes: The results: nodes and constants.
        descriptors: The description of each result.
        plain: The outputs of the step's code among the results. `PlainAOTOutput.idx` is an index into this
            list.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self._output = traced.graph.output_node()
        self.nodes: list[Any] = list(self._output.args[0])  # type: ignore[arg-type]
        self.descriptors: list[Any] = list(self._output.meta["desc"])
        self.plain = list(traced.plain)

    def described(self) -> list[tuple[Any, Any]]:
        """Return the results with their descriptors."""
        return list(zip(self.nodes, self.descriptors, strict=True))

    def of_kinds(self, *kinds: Kind) -> list[tuple[int, Any, Output]]:
        """Return the outputs of the step's code of these kinds, in order. Each entry is the index of the result,
        the result (a node or a constant), and the description of the output."""
        plain = (
            (index, node, self.plain[desc.idx])
            for index, (node, desc) in enumerate(self.described())
            if isinstance(desc, _torch.PlainAOTOutput)
        )
        return [(index, node, output) for index, node, output in plain if output.kind in kinds]

    def weigh(self, result: int, term: int | None) -> None:
        """Set the term of the output with the index `result`. None: the output is not weighted."""
        index = self.descriptors[result].idx
        self.plain[index] = replace(self.plain[index], term=term)

    def split(self, result: int, values: list[tuple[Output, Mapping[int, Node]]]) -> None:
        """Replace the result with the index `result` by one result for each term of `values`. The first result
        takes this index, and further results are appended.

        Args:
            values: outputs, each with term -> the node for the output's part in this term.
        """
        (first, *others) = [
            (replace(made, term=term), part) for made, parts in values for term, part in parts.items()
        ]
        self.plain[self.descriptors[result].idx], self.nodes[result] = first
        for made, part in others:
            self.nodes.append(part)
            self.descriptors.append(_torch.PlainAOTOutput(idx=len(self.plain)))
            self.plain.append(made)

    def write(self) -> None:
        """Let the graph return these results."""
        self._output.args = (tuple(self.nodes),)
        self._output.meta["desc"] = self.descriptors
