"""What metric objects are updated with: made slice by slice, joined in the order of the samples, handed out on one device group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from lightning_piper.errors import CaptureError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref, Turn
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
    """The mean with weights that follow from the batch: the term has this place in `StepCode.terms`."""

    term: int


# How several values become one: joined along a dimension, by a mean with such weights, or `samples` (a mean over samples), `sum`,
# `max`, `min`, or `same`: there is one, or they are all the same.
Way = int | str | Ratio


@dataclass(frozen=True, kw_only=True)
class Arguments(Node):
    """Arguments of the calls of one metric object, of the replica's local batch: its inputs, one a slice, joined."""

    turn = Turn.LATE


@dataclass(frozen=True, kw_only=True)
class JoinArguments(Instruction):
    """Join the bundles read, tensor by tensor, and hand them out.

    Attributes:
        names: of the tensors.
        ways: for each tensor, how its values become one.
        slices: of the local batch, of which the bundles are.
    """

    op: ClassVar[str] = "join"
    names: tuple[str, ...]
    ways: tuple[Way, ...]
    slices: tuple[Slice, ...]

    def details(self) -> list[str]:
        return [*super().details(), "as", "argument:" + ",".join(self.names)]


def ways_of(dag: TrainingDAG, node: Arguments) -> tuple[Way, ...]:
    """How the values of each tensor in several slices, or in several replicas, become one.

    Raises:
        CaptureError: more than one of its dimensions follows the samples.
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
                f"argument {name} of a metric object has shape {list(a.shape)} for {dag.size} samples and {list(b.shape)} for "
                f"{part}; give it tensors of which one dimension counts the samples"
            )
        ways.append(dims[0] if dims else _way(dag, dag.code.metrics.terms[name]))
    return tuple(ways)


def _way(dag: TrainingDAG, term: int | None) -> Way:
    if term is None:
        return "same"
    weighing = dag.code.terms[term].weighing
    return Ratio(term) if weighing == Weighing.RATIO else str(weighing)


def shares(
    step: Step, way: Way, slices: Sequence[Slice], leaves: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The weight of each slice among these in a mean."""
    if isinstance(way, Ratio):
        denominators = [step.at(len(part)).terms[way.term].denominator for part in slices]
        rows = [d.counted(leaves, buffers, part) for d, part in zip(denominators, slices, strict=True) if d is not None]
        return list(weights_of([d for d in denominators[:1] if d is not None], torch.stack(rows), in_order(rows), 1)[0])
    total = sum(map(len, slices))
    return [torch.tensor(len(part) / total if way == Weighing.SAMPLES else 1.0, dtype=torch.float64) for part in slices]


def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A value times its weight. Where nothing counts, it may be no number."""
    weight = weight.to(x.device, x.dtype)
    return torch.where(weight == 0, torch.zeros_like(x), x * weight)


def in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, from the first to the last."""
    first, *rest = values
    for x in rest:
        first = first + x
    return first


# Static rules


def check(facts: Facts, node: Arguments) -> Iterable[str]:
    """Its inputs are one value of kind `argument`, of all samples of the replica's local batch, each once, in their order."""
    whole = Slice(0, facts.dag.local_batch_size)
    values = [facts.dag.value(ref) for ref in node.inputs]
    if len({facts.origins.get(ref) for ref in node.inputs}) != 1 or any(value.kind != Kind.ARGUMENT for value in values):
        yield f"{facts.at(node)} joins {', '.join(map(facts.named, node.inputs))}; it joins one output of a region"
        return
    parts = [part for ref in node.inputs for part in facts.parts.get(ref, {})]
    edges = [0, *(part.stop for part in parts)]
    if len(parts) != len(node.inputs) or edges[-1] != whole.stop or [part.start for part in parts] != edges[:-1]:
        found = ", ".join(map(str, parts))
        yield f"{facts.at(node)} joins {names_of(values[0].names)} of samples {found}, not each of {whole} once and in order"


def undelivered(facts: Facts) -> Iterable[str]:
    """Every metric object gets its arguments, once."""
    dag = facts.dag
    wanted = sorted(out.names for i in dag.code.interfaces.values() for out in i.outputs if out.kind == Kind.ARGUMENT)
    found = sorted(dag.value(node.inputs[0]).names for node in dag.of_type(Arguments))
    if wanted != found:
        shown, should = (" and ".join(map(names_of, names)) or "nothing" for names in (found, wanted))
        yield f"metric objects get {shown}, where the step gives them {should}"


# Reference semantics


def interpret(run: Reference, node: Arguments) -> Made:
    dag, ways = run.dag, ways_of(run.dag, node)
    names, slices = dag.value(node.inputs[0]).names, _slices(dag, node)
    for replica in run.places:
        columns = zip(*run.inputs(node, replica), strict=True)
        there = [run.samples_of(replica, part) for part in slices]
        for name, way, tensors in zip(names, ways, columns, strict=True):
            run.results[dag.replica_of(replica)][name] = _merged(run, list(tensors), there, way)
    return [[] for _ in run.places]


def _merged(run: Reference, tensors: list[torch.Tensor], slices: list[Slice], way: Way) -> torch.Tensor:
    if len(tensors) == 1 or way == "same":
        return tensors[0]
    if isinstance(way, int):
        return torch.cat(tensors, way)
    if way in ("max", "min"):
        stacked = torch.stack(tensors)
        return stacked.amax(0) if way == "max" else stacked.amin(0)
    if way != "sum":
        weights = shares(run.dag.step, way, slices, run.leaves, run.tensors)
        tensors = [torch.zeros_like(x) if w == 0 else x * w.to(x.dtype) for x, w in zip(tensors, weights, strict=True)]
    return list(itertools.accumulate(tensors))[-1]


def _samples(dag: TrainingDAG, ref: Ref) -> int:
    return len(dag.producer(ref).slice)


def _slices(dag: TrainingDAG, node: Arguments) -> tuple[Slice, ...]:
    return tuple(dag.producer(ref).slice for ref in node.inputs)


# Plans


def lower(plan: Planning, node: Arguments) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    names, ways = plan.dag.value(node.inputs[0]).names, ways_of(plan.dag, node)
    plan.emit(JoinArguments(**about(node), reads=reads, names=names, ways=ways, slices=_slices(plan.dag, node)))


# Runtime


def bind_join(instruction: JoinArguments, on: Binding) -> Bound:
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


def join(values: Sequence[torch.Tensor], way: Way, weights: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
    """One value of several, in the order of their samples; sums are left folds. `weights`: of each, in a mean."""
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
