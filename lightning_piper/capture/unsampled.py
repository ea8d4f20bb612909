"""Arguments of metric objects in which there is nothing of the samples: numbers of rows, masks, and what is made of `batch_idx`.

A microbatch counts its own rows, from 0 on (`torch.arange(len(x))`, the queries of a retrieval metric). So these arguments are not
put together from those of microbatches, but computed once, for all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lightning_piper.capture import _torch
from lightning_piper.capture.trace import Traced
from lightning_piper.ir.values import Kind

Unsampled = Callable[[Sequence[torch.Tensor]], torch.Tensor]  # gives an argument from what the step's code takes


def unsampled(traced: Traced) -> dict[str, Unsampled]:
    """By name, the arguments that depend on sizes and on numbers alone, in the number of samples that was traced."""
    output = traced.graph.output_node()
    found: dict[str, Unsampled] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if not isinstance(desc, _torch.PlainAOTOutput) or traced.plain[desc.idx].kind != Kind.ARGUMENT:
            continue
        if isinstance(node, Node) and node.meta["val"].ndim and (needed := _needed(node)) is not None:
            found[traced.plain[desc.idx].names[0]] = _function(needed, node)
    return found


def _needed(result: Node) -> list[Node] | None:
    """What it is made of, in the order of the graph; None if there are samples, parameters or random numbers in it."""
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


def _function(needed: list[Node], result: Node) -> Unsampled:
    @torch.no_grad()
    def run(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
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
