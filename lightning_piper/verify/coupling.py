"""Which operation couples the samples of a batch, so that microbatches cannot give the result of the whole batch.

A loss that is a mean over independent samples comes out the same from microbatches. Batch normalisation, an in-batch
contrastive loss or a mean over unpadded tokens does not. To find the culprit, the captured forward graphs run operation by
operation, once on the whole batch and once on each slice, with inputs of the slices cut from those of the whole: the first
operation whose results do not agree is the one that looks across samples.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from lightning_piper.capture import CapturedStep
from lightning_piper.ir.seeds import seed_of
from lightning_piper.ir.values import Slice

TOLERANCE = 64  # in eps of the dtype: an operation that only sums in another order stays far below


@dataclass(frozen=True)
class Coupling:
    """An operation that mixes samples.

    Attributes:
        region: label of its region.
        source: where the region begins.
        operation: the ATen operation.
        distance: how far the slices' results of the region are from those of the whole batch, relative to the largest value.
    """

    region: str
    source: str
    operation: str
    distance: float

    def __str__(self) -> str:
        return (
            f"{self.operation} in region {self.region} ({self.source}) looks across the samples of a batch: on microbatches it "
            f"moves by {self.distance:.1e}"
        )


def find_couplings(
    step: CapturedStep, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], slices: Sequence[Slice]
) -> list[Coupling]:
    """The first operation of each region that couples the batch when it is cut into `slices`; empty if none does."""
    whole = Slice(0, step.size)
    values: dict[tuple[int, int], torch.Tensor] = {}  # (region, output) -> value for the whole batch
    found: list[Coupling] = []
    code = step.at(step.size)
    for region in code.regions:
        key = (region.index, "F")
        if key not in code.interfaces:
            continue
        interface = code.interfaces[key]
        inputs = [values[r, i] for r, _, i in interface.inputs]
        fixed = [tensors[name].detach() for name in interface.params + interface.buffers + interface.state]

        def record(part: Slice, key: tuple[int, str] = key, inputs: list[torch.Tensor] = inputs,
                   fixed: list[torch.Tensor] = fixed) -> _Recorder:  # fmt: skip
            at = step.at(len(part))
            cut = [_part(x, spec.shape, part, step.size) for x, spec in zip(inputs, _input_specs(at, key), strict=True)]
            batch = [leaves[i][part.start : part.stop] if leaves[i].ndim else leaves[i] for i in at.interfaces[key].batch]
            graph = at.code[key].graph
            recorder = _Recorder(torch.fx.GraphModule(graph.owning_module or torch.nn.Module(), _plain(graph)))
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(seed_of(0, *key, 0))
                recorder.run(*cut, *fixed, *batch)
            return recorder

        full, parts = record(whole), [record(part) for part in slices]
        for i, specs in enumerate(code.code[key].outputs):
            if interface.outputs[i].kind == "activation":
                place = sum(len(s) for s in code.code[key].outputs[:i])
                assert len(specs) == 1
                values[region.index, i] = full.results[place]
        kinds = [out.kind for out, specs in zip(interface.outputs, code.code[key].outputs, strict=True) for _ in specs]
        coupled = None if interface.random else _first_difference(full, parts, slices, step.size, kinds)
        if coupled is not None:
            found.append(Coupling(region.label, region.source, *coupled))
    return found


class _Recorder(Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self.order: list[Node] = list(module.graph.nodes)
        self.results: tuple[torch.Tensor, ...] = ()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        if n.op == "output":
            self.results = value
        return value


def _plain(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy that is called with separate arguments."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _input_specs(code: Any, key: tuple[int, str]) -> list[Any]:
    return [code.code[r, p].outputs[i][0] for r, p, i in code.interfaces[key].inputs]


def _part(x: torch.Tensor, shape: tuple[int, ...], part: Slice, size: int) -> torch.Tensor:
    """The samples of `part`, along the dimension in which `shape` is smaller."""
    for dim, (a, b) in enumerate(zip(x.shape, shape, strict=True)):
        if a != b:
            rows = a // size
            return x.narrow(dim, part.start * rows, len(part) * rows)
    return x


def _first_difference(
    full: _Recorder, parts: list[_Recorder], slices: Sequence[Slice], size: int, kinds: Sequence[str]
) -> tuple[str, float] | None:
    """The first operation that the slices do not reproduce, and how far the region's results are off; None if all agree."""
    outputs: Any = full.order[-1].args[0]
    results = [x for x, kind in zip(outputs, kinds, strict=True) if kind in ("activation", "loss")]
    relevant = _ancestors(results)  # not what is only kept for the backward, nor what is only logged
    first: Node | None = None
    worst = 0.0
    for k, node in enumerate(full.order):
        if node not in relevant or node.op != "call_function":
            continue
        if any(len(p.order) <= k or p.order[k].target != node.target for p in parts):
            continue
        value = full.values[node.name]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        merged = _merge(value, [p.values[p.order[k].name] for p in parts], slices, size)
        distance = float("inf") if merged is None else _distance(value, merged)
        if not distance <= TOLERANCE * torch.finfo(value.dtype).eps:
            first = first or node
            if node in results:
                worst = max(worst, distance)
    if first is None or not worst:  # samples that are mixed inside, such as rows in another order, and apart again
        return None
    while first.target is operator.getitem or _is_view(first):
        first = first.all_input_nodes[0]
    return str(first.target).removesuffix(".default"), worst


def _ancestors(nodes: list[Node]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    difference = float(torch.where(a == b, 0.0, a - b).abs().max())  # masks hold -inf on both sides
    finite = a[a.isfinite()]
    distance = difference / ((float(finite.abs().max()) if finite.numel() else 0.0) or 1.0)
    return distance if distance == distance else float("inf")  # NaN: no sample of a slice counts


def _is_view(node: Node) -> bool:
    return str(node.target).split(".")[1:2] in (["view"], ["clone"], ["alias"], ["detach"]) and bool(node.all_input_nodes)


def _merge(value: torch.Tensor, others: list[torch.Tensor], slices: Sequence[Slice], size: int) -> torch.Tensor | None:
    """What the slices say about `value`: joined where they follow the batch, averaged where they are a number of the batch.

    None where two dimensions follow the batch: such a value compares samples with each other.
    """
    dims = [d for d, (a, b) in enumerate(zip(value.shape, others[0].shape, strict=True)) if a != b]
    if len(dims) > 1:
        return None
    if dims:
        return torch.cat(others, dims[0])
    if all(torch.equal(x, value) for x in others):
        return value
    return torch.stack([x * (len(part) / size) for x, part in zip(others, slices, strict=True)]).sum(0)
