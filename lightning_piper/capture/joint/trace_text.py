"""A traced step as text, operation by operation. Two traces are equal if their texts are equal.

Piper compares the traces of different batch sizes, and of a step that is traced twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from lightning_piper.capture.joint.region_assignment import source_line
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.user_code.source import LINE_KEY
from lightning_piper.ir.metric_calls import MetricCall
from lightning_piper.ir.values import TensorSpec


@dataclass(frozen=True)
class TraceText:
    """A trace as text that can be compared with the text of another trace.

    Attributes:
        lines: One line for each node of the graph, then one for each logged value and each use of a metric
            object.
        sources: The user's source line for each of `lines`, or "" if the source line is not known.
        specs: For each node of the graph, the specs of the tensors that it returns. For batches of the same
            shapes, they differ between traces with equal lines only if a trace with symbols is wrong.
    """

    lines: tuple[str, ...]
    sources: tuple[str, ...]
    specs: tuple[tuple[TensorSpec, ...], ...]

    def with_logs_of(self, other: TraceText) -> TraceText:
        """Return this text with the logs and metric calls of another trace, whose graph is equal and was not made."""
        count = len(self.specs)
        return replace(
            self, lines=self.lines[:count] + other.lines, sources=self.sources[:count] + other.sources
        )


def text_of(
    traced: TracedGraph,
    filled: Callable[[Any], Any] = lambda argument: argument,
    spec: Callable[[torch.Tensor], TensorSpec] = TensorSpec.of,
) -> TraceText:
    """Return a trace as text.

    Args:
        filled: returns the argument to show for an operation's argument. A trace with symbols shows numbers
            instead of each `SymbolicSize`.
        spec: returns the spec of a tensor of the trace.
    """
    numbers: dict[Node, int] = {}
    lines, sources, specs = [], [], []
    constants: Any = traced.graph.owning_module
    for node in traced.graph.nodes:
        numbers[node] = len(numbers)
        specs.append(tuple(_laid_out(spec(x)) for x in tensors_of(node)))
        target = _content(getattr(constants, str(node.target))) if node.op == "get_attr" else str(node.target)
        if node.op in ("placeholder", "output"):
            target = node.op
        arguments = [_shown(filled(x), numbers) for x in (*node.args, *node.kwargs.values())]
        names = [*("" for _ in node.args), *(f"{key}=" for key in node.kwargs)]
        lines.append(
            f"{target}({', '.join(name + text for name, text in zip(names, arguments, strict=True))})"
        )
        line = str(node.meta.get("custom", {}).get(LINE_KEY, ""))
        sources.append((line or source_line(node)) if node.op == "call_function" else "")
    for log in traced.logs:
        constant = "" if log.constant is None or callable(log.constant) else repr(log.constant)
        lines.append(
            f"self.log({log.name!r}, {constant}) {log.reduce} {sorted(map(str, _fixed(log.kwargs).items()))}"
        )
        sources.append("")
    for event in traced.metrics.events:
        if isinstance(event, MetricCall):
            shown = f"self.{event} {_fixed(event.entries)}"
        else:
            shown = str(replace(event, kwargs=_fixed(event.kwargs)))
        lines.append(f"{shown} after {event.after} logs")
        sources.append(event.where if isinstance(event, MetricCall) else "")
    return TraceText(tuple(lines), tuple(sources), tuple(specs))


def _fixed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the type in place of each value that is not of a plain type, such as a number that
    may change from step to step."""
    plain = (bool, int, float, str, type(None))
    return {key: x if type(x) in plain else type(x) for key, x in kwargs.items()}


def _laid_out(spec: TensorSpec) -> TensorSpec:
    """Return the spec without the strides of dimensions with one element, because such strides have no
    meaning."""
    strides = (0 if size == 1 else stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return TensorSpec(spec.shape, spec.dtype, tuple(strides))


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the tensors of a node's value in the trace: none, one, or all tensors of a list of results."""
    value = node.meta.get("val")
    return [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, torch.Tensor)]


def difference(before: TraceText, after: TraceText, ranks: tuple[int, int] | None = None) -> str | None:
    """Return a text that shows the first line that differs, with its source line if that is known. Return None
    if the lines are equal. Specs are not compared.

    Args:
        before, after: An earlier and a later trace of a step, or the traces of two processes.
        ranks: The ranks of the two processes.
    """
    if before.lines == after.lines:
        return None
    at = next(
        (i for i, (x, y) in enumerate(zip(before.lines, after.lines, strict=False)) if x != y),
        min(len(before.lines), len(after.lines)),
    )
    was, now = (text.lines[at] if at < len(text.lines) else "nothing" for text in (before, after))
    source = next(
        (text.sources[at] for text in (after, before) if at < len(text.sources) and text.sources[at]), ""
    )
    text = (
        f"was {was}, and is {now}"
        if ranks is None
        else f"is {was} on rank {ranks[0]}, and {now} on rank {ranks[1]}"
    )
    return f"{source + ': ' if source else ''}operation {at} {text}"


def _shown(argument: Any, numbers: Mapping[Node, int]) -> str:
    return repr(map_aggregate(argument, lambda x: _BareName(f"%{numbers[x]}") if isinstance(x, Node) else x))


class _BareName(str):
    __repr__ = str.__str__


def _content(value: Any) -> str:
    """Return the text of a constant. The text of a tensor has its dtype, its shape and a checksum."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = (
        zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if value.numel()
        else 0
    )
    return f"constant {str(value.dtype).removeprefix('torch.')}{list(value.shape)} #{content:08x}"
