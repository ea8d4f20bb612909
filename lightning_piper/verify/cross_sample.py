"""Finds operations that mix the samples of a batch, so that microbatches cannot give the result of the whole
batch.

A loss that is a mean over independent samples is the same from microbatches. A loss after batch
normalization, or an in-batch contrastive loss, is not. To find the operation, the captured forward graphs run
operation by operation, once on the whole batch and once on each slice. The first operation on the way to the
loss whose results disagree mixes samples.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from lightning_piper.accelerators import seeded
from lightning_piper.capture import CapturedStep
from lightning_piper.capture.eager.eager_reference import term_weights
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.seeds import seed_of
from lightning_piper.ir.values import Slice

# In eps of the dtype: the largest distance between equal results. Sums in another order differ by far less.
TOLERANCE = 64


@dataclass(frozen=True)
class CrossSampleDependence:
    """An operation that makes a result of one sample depend on other samples.

    Attributes:
        region: The label of its region.
        source: The source line where the region begins.
        operation: The ATen operation.
        distance: The largest difference between the region's results on the slices and on the whole batch,
            relative to the largest value.
    """

    region: str
    source: str
    operation: str
    distance: float

    def __str__(self) -> str:
        return (
            f"{self.operation} in region {self.region} ({self.source}) mixes the samples of a batch: on "
            f"microbatches its result changes by {self.distance:.1e}"
        )


def find_dependences(
    step: CapturedStep,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    slices: Sequence[Slice],
) -> list[CrossSampleDependence]:
    """Return the operations with a cross-sample dependence if the batch is cut into `slices`, in the order of
    the step.

    The search starts at losses, logged values and gathered rows that the slices do not reproduce. It goes
    back through operations whose results the slices do not reproduce either. It ends at operations whose
    inputs the slices reproduce. Rows in another order, such as tokens sorted by expert, also look different.
    But the search does not reach them if a later operation restores their order. Operations of regions that
    draw random numbers are left out.
    """
    whole = _SliceRun(step, tensors, leaves, Slice(0, step.size), None)
    sizes = torch.tensor([float(len(part)) for part in slices], dtype=torch.float64)
    weights = [
        sizes / sizes.sum(),
        torch.ones_like(sizes),
        *term_weights(step, tensors, leaves, slices, captured=True),
    ]
    runs = _SliceRuns(
        step, whole, [_SliceRun(step, tensors, leaves, part, whole) for part in slices], slices, weights
    )
    stack = [(region, node) for region, node in runs.ends() if runs.differs(region, node)]
    seen, roots = set(stack), []
    while stack:
        region, node = stack.pop()
        causes = [cause for cause in runs.causes(region, node) if runs.differs(*cause)]
        if not causes and node.op == "call_function":
            roots.append((region, node))
        stack += [cause for cause in causes if cause not in seen]
        seen.update(causes)
    regions = step.at(step.size).regions
    return [
        CrossSampleDependence(
            regions[r].label,
            regions[r].source,
            str(node.target).removesuffix(".default"),
            runs.moved(r, seen),
        )
        for r, node in sorted(
            roots, key=lambda root: (root[0], whole.recorders[root[0]].order.index(root[1]))
        )
        if not step.at(step.size).interfaces[r, "F"].random
    ]


class _SliceRun:
    """The forward passes of all regions on one slice, with every operation recorded.

    `whole` is the run on the whole batch; None if this object is that run. A slice reads the values that it
    made itself, with two exceptions. Each slice draws random numbers of its own, so after a region with
    random numbers a slice reads its part of the values of `whole`. And it reads sums over the whole batch
    from `whole`.
    """

    def __init__(
        self,
        step: CapturedStep,
        tensors: Mapping[str, torch.Tensor],
        leaves: Sequence[torch.Tensor],
        part: Slice,
        whole: _SliceRun | None,
    ) -> None:
        self.code = step.at(len(part))
        self.recorders: dict[int, _Recorder] = {}
        device = leaves[0].device if leaves else torch.device("cpu")
        for region in self.code.regions:
            key = (region.index, "F")
            if key not in self.code.interfaces or region.joined:  # no program cuts a joined region
                continue
            interface, specs = self.code.interfaces[key], _input_specs(self.code, key)
            inputs = []
            for (source, _, i), spec in zip(interface.inputs, specs, strict=True):
                if whole is not None and self.code.interfaces[source, "F"].outputs[i].partial:
                    inputs.append(whole.output(source, i))
                elif whole is not None and self.code.interfaces[source, "F"].random:
                    inputs.append(_part(whole.output(source, i), spec.shape, part, step.size))
                else:
                    inputs.append(self.output(source, i))
            fixed = [
                tensors[name].detach() for name in interface.params + interface.buffers + interface.state
            ]
            cuts = [(leaves[i], step.at(step.size).samples(i, part)) for i in interface.batch]
            batch = [x if cut is None else x[cut.start : cut.stop] for x, cut in cuts]
            graph = self.code.code[key].graph
            recorder = _Recorder(
                torch.fx.GraphModule(graph.owning_module or torch.nn.Module(), _plain(graph))
            )
            with torch.no_grad(), seeded(seed_of(0, *key, 0), device):
                recorder.run(*inputs, *fixed, *batch)
            self.recorders[region.index] = recorder

    def index_of(self, region: int, output: int) -> int:
        """Return the index of an output among all tensors that the region's forward pass makes."""
        return sum(len(specs) for specs in self.code.code[region, "F"].outputs[:output])

    def output(self, region: int, output: int) -> torch.Tensor:
        return self.recorders[region].results[self.index_of(region, output)]

    def results(self, region: int) -> Sequence[Node]:
        return self.recorders[region].order[-1].args[0]  # type: ignore[return-value]


class _SliceRuns:
    """The run on the whole batch and the runs on its slices."""

    def __init__(
        self,
        step: CapturedStep,
        whole: _SliceRun,
        parts: Sequence[_SliceRun],
        slices: Sequence[Slice],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._step, self._whole, self._parts, self._slices = step, whole, parts, slices
        self._weights = weights  # each entry: one possible weighting of the slices

    def ends(self) -> Iterator[tuple[int, Node]]:
        """Yield losses and logged values that are weighted sums over slices, and rows that are gathered from
        slices.
        """
        code = self._whole.code
        for region in self._whole.recorders:
            for i, output in enumerate(code.interfaces[region, "F"].outputs):
                if output.exchange or (output.term is not None and code.terms[output.term].folds == "sum"):
                    yield region, self._whole.results(region)[self._whole.index_of(region, i)]

    def distance(self, region: int, node: Node) -> float:
        """Return the distance between the slices' results and the whole batch's result. It is 0 if the
        results cannot be compared, and infinite if the slices' rows cannot be joined.
        """
        full, parts = self._whole.recorders[region], [part.recorders[region] for part in self._parts]
        value, k = full.values[node.name], full.order.index(node)
        if any(
            len(p.order) <= k or (p.order[k].target != node.target and node.op == "call_function")
            for p in parts
        ):
            return 0.0
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return 0.0
        found = [p.values[p.order[k].name] for p in parts]
        if any(a != b for a, b in zip(value.shape, found[0].shape, strict=True)):
            merged = _joined(value, found)
            return float("inf") if merged is None else _distance(value, merged)
        if all(torch.equal(x, value) for x in found):
            return 0.0
        return min(_distance(value, _weighted(found, weights)) for weights in self._weights)

    def differs(self, region: int, node: Node) -> bool:
        """Return whether the value of a node on the slices and its value on the whole batch differ by more
        than `TOLERANCE`."""
        value = self._whole.recorders[region].values[node.name]
        if isinstance(value, list | tuple):  # a tuple differs if a value taken from it differs
            return any(self.differs(region, user) for user in node.users if user.target is operator.getitem)
        eps = (
            torch.finfo(value.dtype).eps
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else 0.0
        )
        return not self.distance(region, node) <= TOLERANCE * eps

    def causes(self, region: int, node: Node) -> list[tuple[int, Node]]:
        """Return the values from which a value was made: inputs of the operation, or an output of another
        region. The result is empty for parameters, the batch, and outputs of regions with random numbers.
        """
        if node.op != "placeholder":
            return [(region, made) for made in node.all_input_nodes]
        inputs = self._whole.code.interfaces[region, "F"].inputs
        index = self._whole.recorders[region].order.index(node)
        if index >= len(inputs) or self._whole.code.interfaces[inputs[index][0], "F"].random:
            return []
        source, _, i = inputs[index]
        return [(source, self._whole.results(source)[self._whole.index_of(source, i)])]

    def moved(self, region: int, seen: set[tuple[int, Node]]) -> float:
        """Return the largest distance among the region's results that the search visited."""
        return max(
            self.distance(region, node) for node in self._whole.results(region) if (region, node) in seen
        )


class _Recorder(Interpreter):
    """An interpreter that keeps the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self.order: list[Node] = list(module.graph.nodes)
        self.results: tuple[torch.Tensor, ...] = ()

    def run_node(self, n: Node) -> Any:
        """Run a node and record its value."""
        runs = n.meta.get(RUNS_KEY)
        if runs is None:
            value = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            value = runs(*args, **kwargs)
        self.values[n.name] = value
        if n.op == "output":
            self.results = value
        return value


def _plain(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of the graph whose code takes separate arguments."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _input_specs(code: Any, key: tuple[int, str]) -> list[Any]:
    return [code.code[r, p].outputs[i][0] for r, p, i in code.interfaces[key].inputs]


def _part(x: torch.Tensor, shape: tuple[int, ...], part: Slice, size: int) -> torch.Tensor:
    """Return the samples of `part`, along the dimension in which `shape` is smaller. Return `x` if its shape
    is `shape`."""
    for dim, (a, b) in enumerate(zip(x.shape, shape, strict=True)):
        if a != b:
            rows = a // size
            return x.narrow(dim, part.start * rows, len(part) * rows)
    return x


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    difference = float(torch.where(a == b, 0.0, a - b).abs().max())  # masks have -inf on both sides
    finite = a[a.isfinite()]
    distance = difference / ((float(finite.abs().max()) if finite.numel() else 0.0) or 1.0)
    return distance if distance == distance else float("inf")  # NaN: no sample of a slice counts


def _joined(value: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the slices' values joined along the batch; None if they cannot be joined.

    None means that the operation compares samples: two dimensions follow the batch, or the number of rows is
    not one for each sample.
    """
    dims = [d for d, (a, b) in enumerate(zip(value.shape, others[0].shape, strict=True)) if a != b]
    made = torch.cat(others, dims[0]) if len(dims) == 1 else None
    return made if made is not None and made.shape == value.shape else None


def _weighted(others: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the slices' values."""
    return torch.stack(
        [x * w.to(x.dtype) if w else torch.zeros_like(x) for x, w in zip(others, weights, strict=True)]
    ).sum(0)
