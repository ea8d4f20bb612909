"""Outputs of a forward-only step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_piper.ir.nodes import Chunk, IssuePriority, Node
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.ops.base import Operation, Planning, about, register_operation
from lightning_piper.ops.facts import Facts, names_of, slices_of
from lightning_piper.ops.reference import Made, Reference
from lightning_piper.ops.update import Deliver


@dataclass(frozen=True, kw_only=True)
class Result(Node):
    """A node that outputs tensors of a forward-only step's return value, made from the local batch."""

    turn = IssuePriority.DEFERRED


def check(facts: Facts, node: Result) -> Iterable[str]:
    """The node must output one value of kind `result`, made from all samples of the replica's local batch."""
    ref, whole = node.inputs[0], Slice(0, facts.dag.local_batch_size)
    value = facts.dag.value(ref)
    if len(node.inputs) != 1 or value.kind != Kind.RESULT:
        yield (
            f"{facts.at(node)} returns {', '.join(map(facts.named, node.inputs))}, but it may return one result of a "
            "region only"
        )
    elif (parts := facts.parts.get(ref, {})) != {whole: 1}:
        yield f"{facts.at(node)} returns {facts.named(ref)} of samples {slices_of(parts)}, not of {whole}"


def unreturned(facts: Facts, final: bool) -> Iterable[str]:
    """Every result must reach every device group once; before the program is complete, at least one group."""
    dag = facts.dag
    wanted = sorted(
        out.names
        for interface in dag.code.interfaces.values()
        for out in interface.outputs
        if out.kind == Kind.RESULT
    )
    found: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for node in dag.of_type(Result):
        found.setdefault(node.devices, []).append(dag.value(node.inputs[0]).names)
    if not final:
        missing = set(wanted) - {names for there in found.values() for names in there}
        if missing:
            yield f"results {', '.join(map(names_of, sorted(missing)))} are returned nowhere"
        return
    for devices in {chunk.devices for chunk in dag.of_type(Chunk)} | set(found) if wanted or found else ():
        there = sorted(found.get(devices, []))
        if there != wanted:
            shown, should = (" and ".join(map(names_of, names)) or "nothing" for names in (there, wanted))
            yield (
                f"device {','.join(map(str, devices))} returns the results {shown}, but the step returns "
                f"{should}"
            )


def interpret(run: Reference, node: Result) -> Made:
    for r in run.group_ranks:
        run.results[run.dag.replica_of(r)] |= zip(
            run.dag.value(node.inputs[0]).names, run.values[node.inputs[0], r], strict=True
        )
    return [[] for _ in run.group_ranks]


def lower(plan: Planning, node: Result) -> None:
    value, read = plan.dag.value(node.inputs[0]), plan.read(node.inputs[0], node)
    plan.emit(
        Deliver(
            **about(node), reads=(read,), kind=value.kind, names=value.names, source=plan.source(read.slot)
        )
    )


register_operation(Operation(Result, check, interpret, lower, alike=True))
