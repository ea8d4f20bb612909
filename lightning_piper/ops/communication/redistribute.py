"""Changes of a value's placement along an axis whose members have parts or terms of it.

The changes::

    P -> R          all-reduce
    P -> S(d)       reduce-scatter
    S(d) -> R       all-gather
    S(d) -> S(e)    all-to-all
    R -> S(d)       each member cuts its part out, without communication
    S(d) -> S(d)+i  shift: each member sends its part to the i-th member after it, and to no other member
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_piper.ir.division import Change
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node, Ref
from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded, TensorSpec, is_shift
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Bundle,
    Exchange,
    Operation,
    Planning,
    about,
    nothing,
    register_operation,
    take,
)
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.reduce import AllReduceInstruction, bind_all_reduce, summed
from lightning_piper.ops.facts import Facts, Origin
from lightning_piper.ops.instruction import Channel, Collective, Instruction, all_pairs, neighbors
from lightning_piper.ops.reference import Made, Reference, sum_in_order

NAMES = {
    ("P", "R"): "allreduce",
    ("P", "S"): "reducescatter",
    ("S", "R"): "allgather",
    ("S", "S"): "alltoall",
    ("R", "S"): "cut",
}


@dataclass(frozen=True, kw_only=True)
class Redistribute(Node):
    """A node that changes the placement of a value along an axis.

    Attributes:
        before, after: The placements.
        mesh, axis: The mesh, and the name of its axis whose lines are the groups of members.
    """

    turn = IssuePriority.CRITICAL_COMM
    communicates = True

    before: Placement
    after: Placement
    mesh: Mesh
    axis: str

    @property
    def label(self) -> str:
        name = NAMES.get((str(self.before)[0], str(self.after)[0]), "change")
        return f"{'shift' if is_shift(self.before, self.after) else name}.{self.axis}"

    @property
    def details(self) -> str:
        return f"{self.before} -> {self.after}"

    def members(self, replica: int) -> tuple[int, ...]:
        return tuple(map(self.devices.__getitem__, self.mesh.line(self.axis, replica)))


@dataclass(frozen=True, kw_only=True)
class CutOut(Redistribute):
    """A node that cuts each member's part out of a replicated value."""

    turn = IssuePriority.BOOKKEEPING
    communicates = False


@dataclass(frozen=True, kw_only=True)
class RedistributeInstruction(Collective):
    """An instruction that sends each member its part, and joins the received parts; see `Redistribute`.

    For P -> R, the plan has a `PartsInstruction` instead.

    Attributes:
        before, after: The placements.
        tensors: Specs of the result.
    """

    op: ClassVar[str] = "redistribute"
    before: Placement
    after: Placement
    tensors: tuple[TensorSpec, ...]

    @property
    def routes(self) -> tuple[Channel, ...]:
        moved = isinstance(self.before, Sharded) and isinstance(self.after, Sharded)
        return all_pairs(self.members) if moved else super().routes

    @property
    def gathers(self) -> bool:
        return isinstance(self.before, Sharded) and isinstance(self.after, Replicated)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered tensor, of all terms of a sum, or of one member's part in other exchanges."""
        made = sum(spec.nbytes for spec in self.tensors)
        return made * len(self.members) if isinstance(self.before, Partial) else made

    def details(self) -> list[str]:
        return [f"{self.before}->{self.after}", *super().details()]


@dataclass(frozen=True, kw_only=True)
class ShiftInstruction(RedistributeInstruction):
    """An instruction that sends this member's part to one member, and receives the part of one member."""

    op: ClassVar[str] = "shift"
    direct: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        """The distance from this member to the member that it sends to."""
        return _steps(self.before, self.after)

    @property
    def routes(self) -> tuple[Channel, ...]:
        return neighbors(self.members, self.steps)


@dataclass(frozen=True, kw_only=True)
class PartsInstruction(AllReduceInstruction):
    """An instruction that sums the members' tensors.

    Chunks wait for the sum, so every batch of a gradient accumulation runs it.
    """

    op: ClassVar[str] = "sum_parts"
    sums: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class CutOutInstruction(Instruction):
    """An instruction that cuts part `index` of `count` parts out of the only tensor of a bundle. The placement
    `after` says how the tensor is divided."""

    op: ClassVar[str] = "cut_out"
    after: Sharded
    index: int
    count: int


# Static rules


def check(facts: Facts, node: Redistribute) -> Iterable[str]:
    """The node must make a change that the step needs, along a dividing axis, from the input's placement."""
    dag, ref = facts.dag, node.inputs[0]
    facts.forward(node)
    value, made = dag.value(ref), node.outputs[0]
    if node.axis not in dag.member_axes or node.mesh != dag.mesh:
        divided = f"tensors are divided along {', '.join(dag.member_axes) or 'no axis'} of {dag.mesh}"
        yield f"{facts.at(node)} works along {node.axis} of {node.mesh}, but {divided}"
        return
    if is_shift(node.before, node.after) and _steps(node.before, node.after) % node.mesh.size(node.axis) == 0:
        yield (
            f"{facts.at(node)} shifts {node.before} to {node.after}, which moves nothing: the shift goes round all "
            f"{node.mesh.size(node.axis)} members"
        )
    if isinstance(node, CutOut) is not isinstance(node.before, Replicated):
        yield f"{facts.at(node)} makes {node.after} of {node.before}"
    if (
        ref in facts.origins
        and not facts.dag.code.interface_of(facts.origins[ref][:2]).outputs[facts.origins[ref][2]].changes
    ):
        yield (
            f"{facts.at(node)} changes the placement of {facts.named(ref)}, but no node reads it with the "
            "new placement"
        )
    found = dict(value.others).get(node.axis, Replicated())
    if found != node.before:
        yield f"{facts.at(node)} reads {value.label} as {node.before}, but it is {found}"
    if made.others != (wanted := held_after(value.others, node.axis, node.after)):
        yield f"{facts.at(node)} declares {made.label} {dict(made.others)}, but it is {dict(wanted)}"
    if (made.kind, made.names, made.placement, made.bucket) != (
        value.kind,
        value.names,
        value.placement,
        value.bucket,
    ):
        yield f"{facts.at(node)} describes its output differently from its input {facts.named(ref)}"
    if made.tensors != changed_specs(value.tensors, node.before, node.after, node.mesh.size(node.axis)):
        yield (
            f"{facts.at(node)} declares tensors of {made.label} that {node.before} -> {node.after} does not "
            "make"
        )


def changed_specs(
    specs: Sequence[TensorSpec], before: Placement, after: Placement, degree: int
) -> tuple[TensorSpec, ...]:
    """Return the specs, with contiguous strides, of what a device has after a change of placement.

    The result is empty if a tensor does not have the dimension of a placement.
    """
    made = []
    for spec in specs:
        shape = list(spec.shape)
        for placement in (before, after):
            if isinstance(placement, Sharded) and placement.dim >= len(shape):
                return ()
        if isinstance(before, Sharded):
            shape[before.dim] *= degree
        if isinstance(after, Sharded):
            shape[after.dim] //= degree
        made.append(TensorSpec.contiguous(shape, spec.dtype))
    return tuple(made)


def held_after(
    others: tuple[tuple[str, Placement], ...], axis: str, placement: Placement
) -> tuple[tuple[str, Placement], ...]:
    """Return `Value.others` after a change of placement along an axis."""
    found = {held_along: held for held_along, held in others if held_along != axis}
    return tuple(sorted((found if isinstance(placement, Replicated) else found | {axis: placement}).items()))


def read_as_wanted(facts: Facts, node: Chunk, ref: Ref, wanted: Origin) -> Iterable[str]:
    """A pass on parts must read each value with the placement that its code takes."""
    changes = (
        facts.dag.code.interface_of(wanted[:2]).outputs[wanted[2]].changes if facts.dag.member_axes else ()
    )
    found: list[Change] = []
    source = facts.dag.nodes[facts.dag.source(ref)[0]]
    while isinstance(source, Redistribute | AllToAll):
        if isinstance(source, Redistribute):
            found.append(Change(source.axis, source.before, source.after))
        source = facts.dag.nodes[facts.dag.source(source.inputs[0])[0]]
    if tuple(reversed(found)) == changes:
        return
    if found and not changes:
        yield f"{facts.at(node)} reads {facts.named(ref)} with a changed placement, but its code reads it unchanged"
    else:
        takes = ", and ".join(f"as {each.before}, but its code takes {each.after}" for each in changes)
        yield f"{facts.at(node)} reads {facts.named(ref)} {takes}: change the placement first"


def _steps(before: Placement, after: Placement) -> int:
    assert isinstance(before, Sharded) and isinstance(after, Sharded)
    return after.turn - before.turn


# Reference semantics


def interpret(run: Reference, node: Redistribute) -> Made:
    made: dict[int, Bundle] = {}
    for line in node.mesh.lines(node.axis):
        whole = _whole([run.values[node.inputs[0], group_rank] for group_rank in line], node.before)
        for index, group_rank in enumerate(line):
            made[group_rank] = tuple(_part(x, node.after, index, len(line)) for x in whole)
    return [[list(made[group_rank])] for group_rank in run.group_ranks]


def _whole(held: Sequence[Sequence[torch.Tensor]], before: Placement) -> Sequence[torch.Tensor]:
    match before:
        case Partial():
            return sum_in_order([list(bundle) for bundle in held])
        case Sharded():
            return [before.joined(parts) for parts in zip(*held, strict=True)]
    return held[0]


def _part(x: torch.Tensor, after: Placement, index: int, count: int) -> torch.Tensor:
    return after.parts(x, count)[index] if isinstance(after, Sharded) else x.contiguous()


# Plans


def lower(plan: Planning, node: Redistribute) -> None:
    reads, tensors = (plan.read(node.inputs[0], node),), node.outputs[0].tensors
    if isinstance(node.before, Partial) and isinstance(node.after, Replicated):
        plan.start(node, PartsInstruction, reads, tensors=tensors)
    else:
        kind = ShiftInstruction if is_shift(node.before, node.after) else RedistributeInstruction
        plan.start(node, kind, reads, before=node.before, after=node.after, tensors=tensors)


def produce_cut_out(plan: Planning, node: CutOut, ref: Ref) -> None:
    """Emit the instruction that cuts this device's part out of the node's input."""
    line = node.mesh.line(node.axis, plan.group_rank)
    assert isinstance(node.after, Sharded)
    read = plan.read(node.inputs[0], node)
    slot = plan.new_slot(ref, "chunk", node.stream)
    plan.emit(
        CutOutInstruction(
            **about(node),
            reads=(read,),
            writes=(slot,),
            after=node.after,
            index=line.index(plan.group_rank),
            count=len(line),
        )
    )


# Runtime


class _Redistribute(Exchange):
    """A change of placement whose state is this member's tensor."""

    def __init__(self, instruction: RedistributeInstruction, on: Binding) -> None:
        self._count, self._take = len(instruction.members), take(instruction, on.slots)
        self._before, self._after = instruction.before, instruction.after

    def bring(self) -> torch.Tensor:
        (x,) = self._take()
        return x

    def parts(self, state: torch.Tensor) -> Sequence[torch.Tensor]:
        if isinstance(self._after, Sharded):
            return self._after.parts(state, self._count)
        return [state.contiguous()] * self._count

    def join(self, state: torch.Tensor, received: Sequence[Any]) -> Bundle:
        if isinstance(self._before, Partial):
            return summed([(part,) for part in received])
        assert isinstance(self._before, Sharded)
        return (self._before.joined(received),)


class _Shift(_Redistribute):
    """A shift. A member sends empty tensors to all members but one, and transports do not send these."""

    def __init__(self, instruction: ShiftInstruction, on: Binding) -> None:
        super().__init__(instruction, on)
        own = instruction.members.index(on.own)
        self._to, self._of = ((own + by) % self._count for by in (instruction.steps, -instruction.steps))

    def parts(self, state: torch.Tensor) -> Sequence[torch.Tensor]:
        return [state.contiguous() if i == self._to else state.new_empty(0) for i in range(self._count)]

    def room(self, state: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.empty_like(parts[self._to]) if i == self._of else state.new_empty(0)
            for i in range(self._count)
        ]

    def join(self, state: torch.Tensor, received: Sequence[Any]) -> Bundle:
        return (received[self._of],)


def bind_redistribute(instruction: RedistributeInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _Redistribute(instruction, on), on.slots)


def bind_shift(instruction: ShiftInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _Shift(instruction, on), on.slots)


def bind_cut_out(instruction: CutOutInstruction, on: Binding) -> Bound:
    """Return the function that cuts this device's part out of a bundle of one tensor."""
    given, into, slots = take(instruction, on.slots), instruction.into, on.slots
    after, index, count = instruction.after, instruction.index, instruction.count

    def cut_out() -> None:
        (x,) = given()
        slots[into] = (after.parts(x, count)[index],)

    return cut_out


register_operation(
    Operation(
        Redistribute,
        check,
        interpret,
        lower,
        bind={
            RedistributeInstruction: bind_redistribute,
            ShiftInstruction: bind_shift,
            PartsInstruction: bind_all_reduce,
        },
        alike=True,
    )
)
register_operation(
    Operation(
        CutOut, check, interpret, nothing, produce_cut_out, bind={CutOutInstruction: bind_cut_out}, alike=True
    )
)
