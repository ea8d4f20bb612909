"""Sums over the whole batch inside a step: over all microbatches and replicas (`totals.total`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node, Ref
from lightning_piper.ir.values import Partial, Placement, Replicated, Slice
from lightning_piper.ops.base import Operation, Planning, register_operation
from lightning_piper.ops.communication.reduce import AllReduceInstruction, bind_all_reduce
from lightning_piper.ops.facts import Facts, carries, slices_of
from lightning_piper.ops.reference import Made, Reference, sum_in_order


@dataclass(frozen=True, kw_only=True)
class OverBatch(Node):
    """A node that exchanges samples' values between the replicas, which together have the whole batch.

    Attributes:
        mesh, axis: The mesh, and the name of its axis along which the batch is divided.
    """

    turn = IssuePriority.CRITICAL_COMM
    communicates = True

    mesh: Mesh
    axis: str = DATA

    def members(self, replica: int) -> tuple[int, ...]:
        return tuple(self.devices[group_rank] for group_rank in self.mesh.line(self.axis, replica))


@dataclass(frozen=True, kw_only=True)
class Total(OverBatch):
    """A node that sums over the samples of the whole batch.

    Its inputs are the terms of slices, `Partial` if there are replicas. Its output is `Replicated`.
    """


@dataclass(frozen=True, kw_only=True)
class TotalInstruction(AllReduceInstruction):
    """An instruction that adds up bundles, and sums them over the members.

    Chunks wait for the sum, so every batch of a gradient accumulation runs it.
    """

    op: ClassVar[str] = "total"
    sums: ClassVar[bool] = False


def placement_of_terms(dag: TrainingDAG) -> Placement:
    """Return the placement of values that each replica makes from its own samples, as terms of a sum."""
    return Partial() if dag.replicas > 1 else Replicated()


# Static rules


def check(facts: Facts, node: Total) -> Iterable[str]:
    """The node must sum the terms of all samples of all replicas exactly once."""
    dag = facts.dag
    facts.forward(node)
    whole = Slice(0, dag.local_batch_size)
    value, made = dag.value(node.inputs[0]), node.outputs[0]
    for ref in node.inputs:
        if facts.origins.get(ref) != facts.origins.get(node.inputs[0]):
            yield f"{facts.at(node)} adds {facts.named(ref)} to {facts.named(node.inputs[0])}"
        if dag.value(ref).placement != placement_of_terms(dag):
            yield (
                f"{facts.at(node)} sums {facts.named(ref)}, which has the placement {dag.value(ref).placement}, not "
                f"{placement_of_terms(dag)}"
            )
        if (devices := dag.nodes[ref[0]].devices) and devices != node.devices:
            yield f"{facts.at(node)} sums {facts.named(ref)}, which lies on devices {list(devices)}"
    parts = sorted(part for ref in node.inputs for part in facts.parts.get(ref, {}))
    edges = [0, *(part.stop for part in parts)]
    if edges[-1] != whole.stop or [part.start for part in parts] != edges[:-1]:
        found = ", ".join(map(str, parts)) or "none"
        yield (
            f"{facts.at(node)} sums {facts.named(node.inputs[0])} of samples {found}, not of each of "
            f"{whole} once"
        )
    if (node.mesh, node.axis) != (dag.mesh, DATA):
        found = f"{facts.named(node.inputs[0])} along {node.axis} of {node.mesh}"
        yield f"{facts.at(node)} sums {found}, but the batch is divided over {dag.replicas} replicas"
    if (*carries(made), made.tensors, made.placement) != (*carries(value), value.tensors, Replicated()):
        yield (
            f"{facts.at(node)} describes its output differently from the sum of {facts.named(node.inputs[0])}"
        )
    facts.parts[node.id, 0] = {whole: facts.share(whole)}


def read_as_total(facts: Facts, node: Chunk, ref: Ref, wanted: tuple[int, str, int]) -> Iterable[str]:
    """A pass must read a sum over the whole batch if the capture says so, and must not otherwise."""
    source = facts.dag.nodes[facts.dag.source(ref)[0]]
    partial = facts.dag.code.interface_of(wanted[:2]).outputs[wanted[2]].partial
    if partial and not isinstance(source, Total):
        found = f"samples {slices_of(facts.parts[ref])}" + (
            " of each replica" if facts.dag.replicas > 1 else ""
        )
        yield f"{facts.at(node)} reads {facts.named(ref)} of {found}. Sum it over the whole batch first"
    elif isinstance(source, Total) and not partial:
        yield (
            f"{facts.at(node)} reads the sum of {facts.named(ref)} over the whole batch, but its region reads the value "
            "of its own samples"
        )


# Reference semantics


def interpret(run: Reference, node: Total) -> Made:
    own = [sum_in_order(run.inputs(node, replica)) for replica in run.group_ranks]
    return [
        [sum_in_order([own[r] for r in node.mesh.line(node.axis, replica)])] for replica in run.group_ranks
    ]


# Plans


def lower(plan: Planning, node: Total) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    plan.start(node, TotalInstruction, reads, tensors=node.outputs[0].tensors)


register_operation(
    Operation(Total, check, interpret, lower, bind={TotalInstruction: bind_all_reduce}, alike=True)
)
