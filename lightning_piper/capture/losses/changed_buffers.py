"""Find the buffers that a step changes, and which of their new values differ between parts of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.fx import Graph, Node

from lightning_piper.capture.torch_private import _torch
from lightning_piper.sample_gathering import GATHER
from lightning_piper.totals import TOTAL


def changed_buffers(described: Iterable[tuple[Any, Any]], canonical: Mapping[str, str]) -> dict[str, Node]:
    """Return canonical name -> node of the new value, for each buffer that the step changes in place.

    Args:
        described: pairs of a result of a traced graph and the result's descriptor.
        canonical: every name of a buffer -> its canonical name.
    """
    return {
        canonical[desc.mutated_input.target.removeprefix("module.")]: node
        for node, desc in described
        if isinstance(desc, _torch.InputMutationAOTOutput)
        and isinstance(desc.mutated_input, _torch.BufferAOTInput)
    }


def is_local(value: Node, changes: Callable[[Node], bool]) -> bool:
    """Return whether a value differs between parts of the batch, or between the devices that compute it.

    A value differs if it depends on samples, on their number, or on random numbers. Sums over the whole batch
    do not differ.

    Args:
        changes: returns whether a value is computed from the number of samples; see `LossTerms.changes`.
    """
    stack, seen = [value], {value}
    while stack:
        node = stack.pop()
        if _torch.is_random(node) or isinstance(node.meta.get("desc"), _torch.PlainAOTInput):
            return True
        new = [x for x in node.all_input_nodes if x not in seen and node.target not in (TOTAL, GATHER)]
        seen.update(new)
        stack += new
    return changes(value)


def names_of_changed_buffers(graph: Graph) -> set[str]:
    """Return the names of the buffers that the step of a traced graph changes."""
    found = [
        d.mutated_input
        for d in graph.output_node().meta["desc"]
        if isinstance(d, _torch.InputMutationAOTOutput)
    ]
    return {buffer.target for buffer in found if isinstance(buffer, _torch.BufferAOTInput)}
