"""The operation `Arguments`. Each slice of the batch makes the arguments of a torchmetrics call. The
operation joins these arguments in the order of the samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import IssuePriority, Node, Ref
from lightning_piper.ir.regions import Step
from lightning_piper.ir.terms import Weighing
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation
from lightning_piper.ops.facts import Facts, names_of
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Made, Reference
from lightning_piper.ops.weights import weights_of


@dataclass(frozen=True)
class Ratio:
    """A mean with weights that follow from the batch; `term` is an index into `StepCode.terms`."""

    term: int


# How several values become one. An integer: concatenate along this dimension. `Ratio`: a mean with these
# weights. Otherwise `samples` (a mean over samples), `sum`, `max`, `min`, or `same` (all values are equal).
Way = int | str | Ratio


@dataclass(frozen=True, kw_only=True)
class Arguments(Node):
    """A node that outputs the arguments of one metric object's calls for the replica's local batch.

    It joins its inputs, one for each slice.
    """

    turn = IssuePriority.DEFERRED


@dataclass(frozen=True, kw_only=True)
class JoinArguments(Instruction):
    """An instruction that joins bundles tensor by tensor, and outputs the results.

    Attributes:
        names: Names of the tensors.
        ways: How the values of each tensor become one.
        slices: The slices of the local batch that the bundles come from.
    """

    op: ClassVar[str] = "join"
    names: tuple[str, ...]
    ways: tuple[Way, ...]
    slices: tuple[Slice, ...]

    def details(self) -> list[str]:
        return [*super().details(), "as", "argument:" + ",".join(self.names)]


def ways_of(dag: TrainingDAG, node: Arguments) -> tuple[Way, ...]:
    """Return, for each tensor, how its values in several slices or replicas become one value.

    Raises:
        CaptureError: The number of samples changes more than one dimension of a tensor, or changes a
            dimension whose size is not proportional to it.
    """
    ref = node.inputs[0]
    names, part = dag.value(ref).names, _samples(dag, ref)
    if part == dag.size:
        return ("same",) * len(names)
    ways: list[Way] = []
    for name, a, b in zip(names, dag.specs_of(ref, dag.size), dag.specs_of(ref, part), strict=True):
        dims = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
        if len(dims) > 1 or any(a.shape[d] * part != b.shape[d] * dag.size for d in dims):
            raise CaptureError(
                f"self.{name.rpartition(' ')[0]} gets a tensor of shape {list(a.shape)} for {counted(dag.size, 'sample')}, and of "
                f"shape {list(b.shape)} for {part}. Pass tensors with one dimension that grows in proportion to the "
                "samples, and no other dimension that depends on them [PIPER-C008]"
            )
        ways.append(dims[0] if dims else _way(dag, dag.code.metrics.terms[name]))
    return tuple(ways)


def _way(dag: TrainingDAG, term: int | None) -> Way:
    if term is None:
        return "same"
    weighing = dag.code.terms[term].weighing
    return Ratio(term) if weighing == Weighing.RATIO else str(weighing)


def shares(
    step: Step,
    way: Way,
    slices: Sequence[Slice],
    leaves: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Return the weight of each slice in a value that joins the slices: its share of the counts for a
    `Ratio`, its share of the samples for `samples`, otherwise 1."""
    if isinstance(way, Ratio):
        denominators = [step.at(len(part)).terms[way.term].denominator for part in slices]
        rows = [
            d.counted(leaves, buffers, part)
            for d, part in zip(denominators, slices, strict=True)
            if d is not None
        ]
        return list(
            weights_of([d for d in denominators[:1] if d is not None], torch.stack(rows), in_order(rows), 1)[
                0
            ]
        )
    total = sum(map(len, slices))
    return [
        torch.tensor(len(part) / total if way == Weighing.SAMPLES else 1.0, dtype=torch.float64)
        for part in slices
    ]


def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a value times its weight. If the weight is 0, return 0, even if the value is not finite."""
    weight = weight.to(x.device, x.dtype)
    return torch.where(weight == 0, torch.zeros_like(x), x * weight)


def in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the values, added from the first to the last."""
    first, *rest = values
    for x in rest:
        first = first + x
    return first


# Static rules


def check(facts: Facts, node: Arguments) -> Iterable[str]:
    """The inputs must be slices of one `argument` output that cover the local batch once and in order."""
    whole = Slice(0, facts.dag.local_batch_size)
    values = [facts.dag.value(ref) for ref in node.inputs]
    if len({facts.origins.get(ref) for ref in node.inputs}) != 1 or any(
        value.kind != Kind.ARGUMENT for value in values
    ):
        yield (
            f"{facts.at(node)} joins {', '.join(map(facts.named, node.inputs))}, but it may join slices of one output "
            "only"
        )
        return
    parts = [part for ref in node.inputs for part in facts.parts.get(ref, {})]
    edges = [0, *(part.stop for part in parts)]
    if (
        len(parts) != len(node.inputs)
        or edges[-1] != whole.stop
        or [part.start for part in parts] != edges[:-1]
    ):
        found = ", ".join(map(str, parts))
        yield (
            f"{facts.at(node)} joins {names_of(values[0].names)} of samples {found}, not each of {whole} "
            "once and in order"
        )


def undelivered(facts: Facts) -> Iterable[str]:
    """Every metric object must get its arguments exactly once."""
    dag = facts.dag
    wanted = sorted(
        out.names for i in dag.code.interfaces.values() for out in i.outputs if out.kind == Kind.ARGUMENT
    )
    found = sorted(dag.value(node.inputs[0]).names for node in dag.of_type(Arguments))
    if wanted != found:
        shown, should = (" and ".join(map(names_of, names)) or "nothing" for names in (found, wanted))
        yield f"metric objects get {shown}, but in the step they get {should}"


# Reference semantics


def interpret(run: Reference, node: Arguments) -> Made:
    """Merge the arguments of each replica's slices, and add the results to `run.results`."""
    dag, ways = run.dag, ways_of(run.dag, node)
    names, slices = dag.value(node.inputs[0]).names, _slices(dag, node)
    for replica in run.group_ranks:
        columns = zip(*run.inputs(node, replica), strict=True)
        there = [run.samples_of(replica, part) for part in slices]
        for name, way, tensors in zip(names, ways, columns, strict=True):
            run.results[dag.replica_of(replica)][name] = _merged(run, list(tensors), there, way)
    return [[] for _ in run.group_ranks]


def _merged(run: Reference, tensors: list[torch.Tensor], slices: list[Slice], way: Way) -> torch.Tensor:
    """Merge the values of all slices as `way` says: join them along a dimension, or take the first, maximum,
    minimum, sum or weighted sum."""
    if len(tensors) == 1 or way == "same":
        return tensors[0]
    if isinstance(way, int):
        return torch.cat(tensors, way)
    if way in ("max", "min"):
        stacked = torch.stack(tensors)
        return stacked.amax(0) if way == "max" else stacked.amin(0)
    if way != "sum":
        weights = shares(run.dag.step, way, slices, run.leaves, run.tensors)
        tensors = [
            torch.zeros_like(x) if w == 0 else x * w.to(x.dtype)
            for x, w in zip(tensors, weights, strict=True)
        ]
    return list(itertools.accumulate(tensors))[-1]


def _samples(dag: TrainingDAG, ref: Ref) -> int:
    return len(dag.producer(ref).slice)


def _slices(dag: TrainingDAG, node: Arguments) -> tuple[Slice, ...]:
    return tuple(dag.producer(ref).slice for ref in node.inputs)


# Plans


def lower(plan: Planning, node: Arguments) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    names, ways = plan.dag.value(node.inputs[0]).names, ways_of(plan.dag, node)
    plan.emit(
        JoinArguments(**about(node), reads=reads, names=names, ways=ways, slices=_slices(plan.dag, node))
    )


# Runtime


def bind_join(instruction: JoinArguments, on: Binding) -> Bound:
    """Return the function that joins the arguments of metric calls from several microbatches.

    A joined value that is one of its inputs may be in memory that the step does not own. `StepOutputs.keep`
    copies such a value. All other joined values are new tensors.
    """
    reads, slots, outputs = instruction.reads, on.slots, on.step_outputs
    names, ways, slices = instruction.names, instruction.ways, instruction.slices

    def run() -> None:
        bundles = [slots[read.slot] for read in reads]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        for name, way, values in zip(names, ways, zip(*bundles, strict=True), strict=True):
            value = join(values, way, partial(on.chunks.shares, way, slices))
            outputs.results[name] = outputs.keep(value) if any(value is x for x in values) else value

    return run


def join(
    values: Sequence[torch.Tensor], way: Way, weights: Callable[[], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Join values in the order of their samples, and add them from the first to the last.

    Args:
        weights: Returns the weight of each value. Only means and ratios call it.
    """
    first, *rest = values
    if not rest or way == "same":
        return first
    if isinstance(way, int):
        return torch.cat(tuple(values), way)
    if way == "samples" or isinstance(way, Ratio):
        return in_order([weighed(x, weight) for x, weight in zip(values, weights(), strict=True)])
    if way == "sum":
        return in_order(values)
    for x in rest:
        first = torch.maximum(first, x) if way == "max" else torch.minimum(first, x)
    return first


register_operation(Operation(Arguments, check, interpret, lower, bind={JoinArguments: bind_join}, alike=True))
