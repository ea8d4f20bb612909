"""Gather the rows of all samples of the batch for a computation, and scatter the gradients of these rows::

    F 0:2, F 2:4 -> gathersamples -> F of the whole batch
    B of the whole batch -> scattersamples -> B 0:2, B 2:4

With replicas, each replica has the rows of its own samples and gets the rows of all samples. The gradients
that a replica computes for all rows have the weight of its share of the batch. The scatter gives each replica
the sum over replicas of the gradients of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.values import Replicated, Slice, TensorSpec, Value
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Bundle,
    Exchange,
    Operation,
    Planning,
    register_operation,
    take,
)
from lightning_piper.ops.communication.reduce import summed
from lightning_piper.ops.communication.total import OverBatch, placement_of_terms
from lightning_piper.ops.facts import Facts, Origin, carries, slices_of
from lightning_piper.ops.instruction import Collective
from lightning_piper.ops.reference import Made, Reference, strided, sum_in_order
from lightning_piper.ops.samples import Cut, restrided


@dataclass(frozen=True, kw_only=True)
class GatherSamples(OverBatch):
    """A node that joins the rows of all samples of all replicas.

    Its inputs are the rows of the local slices, in order.
    """

    placed_by_reader = True


@dataclass(frozen=True, kw_only=True)
class ScatterSamples(OverBatch):
    """A node that sums the gradients of all rows over replicas, and gives each replica its own rows."""


@dataclass(frozen=True, kw_only=True)
class GatherSamplesInstruction(Collective):
    """An instruction that joins the rows of all members.

    Attributes:
        tensors: Specs of the result.
    """

    op: ClassVar[str] = "gather_samples"
    tensors: tuple[TensorSpec, ...]

    @property
    def gathers(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, kw_only=True)
class ScatterSamplesInstruction(Collective):
    """An instruction that sums the members' tensors, and leaves each member its own rows of the sum.

    Attributes:
        tensors: Specs of the result.
    """

    op: ClassVar[str] = "scatter_samples"
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors) * len(self.members)


def exchanged(dag: TrainingDAG, node: GatherSamples | ScatterSamples) -> Value:
    """Return a node's output: the value of its input for all samples of the batch (gather), or for the
    samples of the local batch (scatter)."""
    samples = dag.size if isinstance(node, GatherSamples) else dag.local_batch_size
    return replace(
        dag.value(node.inputs[0]), tensors=dag.specs_of(node.inputs[0], samples), placement=Replicated()
    )


# Static rules


def _check(facts: Facts, node: GatherSamples | ScatterSamples, way: str) -> Iterable[str]:
    """The node must be along the axis that divides the batch, and do the exchange `way` that the readers of
    its input need."""
    dag, ref = facts.dag, node.inputs[0]
    facts.forward(node)
    if (node.mesh, node.axis) != (dag.mesh, DATA):
        found = f"{facts.named(ref)} along {node.axis} of {node.mesh}"
        yield f"{facts.at(node)} exchanges {found}, but the batch is divided over {dag.replicas} replicas"
    origin = facts.origins.get(ref)
    if origin is None or dag.code.interface_of(origin[:2]).outputs[origin[2]].exchange != way:
        yield f"{facts.at(node)} exchanges {facts.named(ref)}, but no node reads the result"
    for other in node.inputs:
        if (devices := dag.nodes[other[0]].devices) and node.devices and devices != node.devices:
            yield f"{facts.at(node)} reads {facts.named(other)}, which lies on devices {list(devices)}"
    made = node.outputs[0]
    if carries(made) != carries(dag.value(ref)) or made != exchanged(dag, node):
        yield (
            f"{facts.at(node)} declares {made.label} as {', '.join(map(str, made.tensors))}, but makes a value with "
            "another shape, dtype or placement"
        )


def check_gather(facts: Facts, node: GatherSamples) -> Iterable[str]:
    """The node must join the rows of all samples of all replicas once and in order."""
    dag, whole = facts.dag, Slice(0, facts.dag.local_batch_size)
    yield from _check(facts, node, "gather")
    edge = 0
    for ref in node.inputs:
        if facts.origins.get(ref) != facts.origins.get(node.inputs[0]):
            yield f"{facts.at(node)} joins {facts.named(ref)} to {facts.named(node.inputs[0])}"
        for part in sorted(facts.parts.get(ref, {})):
            if part.start != edge:
                yield f"{facts.at(node)} joins {facts.named(ref)} of samples {part} after those before {edge}"
            edge = part.stop
        if dag.value(ref).placement != Replicated():
            yield (
                f"{facts.at(node)} joins {facts.named(ref)}, which has the placement {dag.value(ref).placement}, not "
                f"{Replicated()}"
            )
    if edge != whole.stop:
        yield f"{facts.at(node)} joins samples up to {edge} of {whole}"
    rows = [
        sum(x.shape[0] for x in xs)
        for xs in zip(*(dag.value(ref).tensors for ref in node.inputs), strict=False)
    ]
    if rows != [spec.shape[0] // dag.replicas for spec in node.outputs[0].tensors]:
        yield (
            f"{facts.at(node)} joins {', '.join(map(str, rows))} rows of {facts.named(node.inputs[0])}, but it needs "
            f"{', '.join(str(spec.shape[0] // dag.replicas) for spec in node.outputs[0].tensors)}"
        )
    facts.parts[node.id, 0] = {
        whole: next(iter(facts.parts.get(node.inputs[0], {whole: facts.share(whole)}).values()))
    }


def check_scatter(facts: Facts, node: ScatterSamples) -> Iterable[str]:
    """The node must sum the replicas' terms of all rows, and output the replica's own rows."""
    yield from _check(facts, node, "scatter")
    value = facts.dag.value(node.inputs[0])
    if value.placement != placement_of_terms(facts.dag) or len(node.inputs) != 1:
        yield (
            f"{facts.at(node)} sums {facts.named(node.inputs[0])}, which has the placement {value.placement}, not "
            f"{placement_of_terms(facts.dag)}"
        )


def read_as_exchanged(facts: Facts, node: Chunk, ref: Ref, wanted: Origin) -> Iterable[str]:
    """The pass must read the value through the exchange that the capture requires (`Output.exchange`): a
    gather, a scatter, or none."""
    way = facts.dag.code.interface_of(wanted[:2]).outputs[wanted[2]].exchange
    source = facts.dag.nodes[facts.dag.source(ref)[0]]
    while isinstance(source, Cut):
        source = facts.dag.nodes[facts.dag.source(source.inputs[0])[0]]
    found = (
        "gather"
        if isinstance(source, GatherSamples)
        else "scatter"
        if isinstance(source, ScatterSamples)
        else ""
    )
    if found != way:
        of = f"{facts.named(ref)} of samples {slices_of(facts.parts[ref])}"
        needs = {
            "gather": "gather it from the whole batch",
            "scatter": "scatter it to the parts",
            "": "read it as it is",
        }[way]
        yield f"{facts.at(node)} reads {of}: {needs} first"


# Reference semantics


def interpret_gather(run: Reference, node: GatherSamples) -> Made:
    own = [
        [torch.cat(parts) for parts in zip(*run.inputs(node, group_rank), strict=True)]
        for group_rank in run.group_ranks
    ]
    specs = node.outputs[0].tensors
    whole = {}
    for line in node.mesh.lines(node.axis):
        for group_rank in line:
            whole[group_rank] = [
                torch.cat(parts) for parts in zip(*(own[other] for other in line), strict=True)
            ]
    return [
        [[strided(x, spec) for x, spec in zip(whole[group_rank], specs, strict=True)]]
        for group_rank in run.group_ranks
    ]


def interpret_scatter(run: Reference, node: ScatterSamples) -> Made:
    """Sum the gradients along the axis of the batch, and give each replica its own rows of the sum."""
    made: dict[int, list[torch.Tensor]] = {}
    for line in node.mesh.lines(node.axis):
        total = sum_in_order([run.values[node.inputs[0], group_rank] for group_rank in line])
        for index, group_rank in enumerate(line):
            rows = [x.shape[0] // len(line) for x in total]
            made[group_rank] = [x[index * n : (index + 1) * n] for x, n in zip(total, rows, strict=True)]
    return [
        [[strided(x, s) for x, s in zip(made[group_rank], node.outputs[0].tensors, strict=True)]]
        for group_rank in run.group_ranks
    ]


# Plans


def lower_gather(plan: Planning, node: GatherSamples) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    plan.start(node, GatherSamplesInstruction, reads, tensors=node.outputs[0].tensors)


def lower_scatter(plan: Planning, node: ScatterSamples) -> None:
    plan.start(
        node, ScatterSamplesInstruction, (plan.read(node.inputs[0], node),), tensors=node.outputs[0].tensors
    )


# Runtime


class _Gather(Exchange):
    """A gather of rows whose state is the rows of this member, joined."""

    kind = "all_gather"

    def __init__(self, instruction: GatherSamplesInstruction, on: Binding) -> None:
        self._reads, self._slots, self._count = instruction.reads, on.slots, len(instruction.members)
        (self._spec,) = instruction.tensors

    def bring(self) -> torch.Tensor:
        rows = [self._slots[read.slot][0] for read in self._reads]
        for read in self._reads:
            if read.last:
                self._slots[read.slot] = None
        return torch.cat(rows).contiguous()

    def parts(self, state: torch.Tensor) -> Sequence[torch.Tensor]:
        return [state] * self._count

    def room(self, state: torch.Tensor, parts: Sequence[Any]) -> list[torch.Tensor]:
        return list(state.new_empty(self._count * state.shape[0], *state.shape[1:]).chunk(self._count))

    def join(self, state: torch.Tensor, received: Sequence[torch.Tensor]) -> Bundle:
        return (restrided(torch.cat(list(received)), self._spec),)


class _Scatter(Exchange):
    """A scatter of rows whose state is the gradients of all rows."""

    def __init__(self, instruction: ScatterSamplesInstruction, on: Binding) -> None:
        self._take, self._count = take(instruction, on.slots), len(instruction.members)
        (self._spec,) = instruction.tensors

    def bring(self) -> torch.Tensor:
        (x,) = self._take()
        return x.contiguous()

    def parts(self, state: torch.Tensor) -> Sequence[torch.Tensor]:
        return state.chunk(self._count)

    def join(self, state: torch.Tensor, received: Sequence[torch.Tensor]) -> Bundle:
        (total,) = summed([(part,) for part in received])
        return (restrided(total, self._spec),)


def bind_gather(instruction: GatherSamplesInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _Gather(instruction, on), on.slots)


def bind_scatter(instruction: ScatterSamplesInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _Scatter(instruction, on), on.slots)


register_operation(
    Operation(
        GatherSamples,
        check_gather,
        interpret_gather,
        lower_gather,
        bind={GatherSamplesInstruction: bind_gather},
        alike=True,
    )
)
register_operation(
    Operation(
        ScatterSamples,
        check_scatter,
        interpret_scatter,
        lower_scatter,
        bind={ScatterSamplesInstruction: bind_scatter},
        alike=True,
    )
)
