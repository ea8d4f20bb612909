"""Find arguments of metric objects that do not depend on the samples' data: row numbers, masks, and values
computed from `batch_idx`.

A microbatch would count its rows from 0 (`torch.arange(len(x))`, the queries of a retrieval metric). So Piper
computes such an argument once for all samples, and does not combine it from microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Kind

# A function that computes an argument from the inputs of the step's code.
SampleIndependent = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def sample_independent_arguments(traced: TracedGraph) -> dict[str, SampleIndependent]:
    """Return name -> function for the arguments that depend only on sizes and numbers. The function computes
    the argument for the traced number of samples. Arguments without dimensions are left out."""
    output = traced.graph.output_node()
    found: dict[str, SampleIndependent] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if not isinstance(desc, _torch.PlainAOTOutput) or traced.plain[desc.idx].kind != Kind.ARGUMENT:
            continue
        if isinstance(node, Node) and node.meta["val"].ndim and (needed := _needed(node)) is not None:
            found[traced.plain[desc.idx].names[0]] = _function(needed, node)
    return found


def _needed(result: Node) -> list[Node] | None:
    """Return the node `result` and all nodes from which it is computed, in graph order. Return None if it
    depends on samples, parameters, buffers, constant tensors or random numbers."""
    seen, stack = {result}, [result]
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            known = isinstance(node.meta.get("desc"), _torch.PlainAOTInput) and not node.meta["val"].ndim
        else:
            known = node.op == "call_function" and not _torch.is_random(node)
        if not known:
            return None
        stack += [x for x in node.all_input_nodes if x not in seen]
        seen.update(node.all_input_nodes)
    return [node for node in result.graph.nodes if node in seen]


def _function(needed: list[Node], result: Node) -> SampleIndependent:
    """Return a function that computes `result` from the inputs of the step's code. `needed` has the nodes
    that `_needed` returns for `result`."""

    @torch.no_grad()
    def run(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the operations in `needed`, and return the value of `result`."""
        values: dict[Node, Any] = {}
        for node in needed:
            if node.op == "placeholder":
                values[node] = inputs[node.meta["desc"].idx]
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        found = values[result]
        assert isinstance(found, torch.Tensor)
        return found

    return run
