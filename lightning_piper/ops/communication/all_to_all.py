"""Exchange of tokens: from the devices that request experts to the devices that own them, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node, Ref
from lightning_piper.ir.values import Sharded, TensorSpec
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Bundle,
    Exchange,
    Operation,
    Planning,
    Slots,
    register_operation,
)
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import Channel, Collective, all_pairs
from lightning_piper.ops.reference import Made, Reference
from lightning_piper.routing import COMBINE, COUNTS, DISPATCH


@dataclass(frozen=True, kw_only=True)
class AllToAll(Node):
    """A move of tokens between the devices that request experts and the devices that own them::

        counts     counts [E] to [sending device, own expert]: how many rows arrive for each expert
        dispatch   rows to the owners of their experts: sorted by expert, then by the device that sent them
        combine    rows back to their source, in the order in which they left

    A node for `dispatch` or `combine` reads the rows. If experts get different numbers of rows, it also reads
    the counts at the source and the counts that arrived.

    Attributes:
        direction: `counts`, `dispatch` or `combine`.
        region: Index of the region that has the experts.
        mesh, axis: The mesh, and the name of its axis along which rows travel. The parameters of the experts
            are divided along this axis.
    """

    turn = IssuePriority.CRITICAL_COMM
    communicates = True

    direction: str
    region: int
    mesh: Mesh
    axis: str

    @property
    def label(self) -> str:
        return f"alltoall.{self.direction}"

    @property
    def details(self) -> str:
        lines = (
            ",".join(str(self.devices[group_rank]) for group_rank in line)
            for line in self.mesh.lines(self.axis)
        )
        return f"{self.axis}={' | '.join(lines)}"

    def members(self, replica: int) -> tuple[int, ...]:
        """Return the devices along the axis, which together own all experts."""
        return tuple(self.devices[group_rank] for group_rank in self.mesh.line(self.axis, replica))


@dataclass(frozen=True, kw_only=True)
class AllToAllInstruction(Collective):
    """An instruction that sends rows or counts to the owners of experts, or rows back; see `AllToAll`.

    Attributes:
        direction: `counts`, `dispatch` or `combine`.
        tensor: Spec of the expected result. The result may have a different number of rows if experts do not
            all have the same capacity.
    """

    op: ClassVar[str] = "all_to_all"
    direction: str
    tensor: TensorSpec

    @property
    def even(self) -> bool:
        """Whether each member sends and receives equal parts. The instruction then reads only the value that
        it sends."""
        return len(self.reads) == 1

    @property
    def routes(self) -> tuple[Channel, ...]:
        return all_pairs(self.members)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def details(self) -> list[str]:
        return [self.direction, *super().details()]


# Static rules. Together with the rules on gradients they imply that the contribution of every token enters
# the gradient of its experts once. Each replica sends its rows to one group whose members own every expert
# once. Gradients are summed over the replicas with the same rank in all groups, which together have the
# tokens of the whole batch.


def division(facts: Facts) -> Iterable[str]:
    """Each group rank must occur once in the mesh of a divided region, and own an equal part of the region's
    experts."""
    dag = facts.dag
    for region, mesh in dag.meshes.items():
        label, experts = dag.regions[region].label, dag.code.routed[region]
        owners = mesh.parts // math.prod(map(mesh.size, dag.member_axes))
        if sorted(mesh.group_ranks) != list(range(len(dag.mesh.group_ranks))):
            yield (
                f"the mesh of the experts of {label} has the group ranks {list(mesh.group_ranks)}: it needs each of 0 to "
                f"{len(dag.mesh.group_ranks) - 1} once"
            )
        elif experts.count % owners:
            yield (
                f"the {counted(experts.count, 'expert')} of {label} cannot be divided equally over "
                f"{counted(owners, 'replica')}"
            )


def check(facts: Facts, node: AllToAll) -> Iterable[str]:
    """Rows must travel to their experts and back by the counts that the region reads."""
    dag = facts.dag
    facts.forward(node)
    experts = dag.code.routed.get(node.region)
    if experts is None or dag.meshes.get(node.region) != node.mesh or node.axis not in node.mesh.axes:
        yield (
            f"{facts.at(node)} moves rows along {node.axis} of {node.mesh}, but the experts of its region are not "
            "divided along this axis"
        )
        return
    wanted = 1 if node.direction == COUNTS or experts.even else 3
    if len(node.inputs) != wanted:
        yield f"{facts.at(node)} has {counted(len(node.inputs), 'input')}, but it needs {wanted}"
        return
    value, made = dag.value(node.inputs[0]), node.outputs[0]
    at_source, away = (), ((node.axis, Sharded(0)),)
    if (value.others, made.others) != ((away, at_source) if node.direction == COMBINE else (at_source, away)):
        held = "on the devices of their experts" if value.others else "on the devices of their samples"
        yield f"{facts.at(node)} exchanges {facts.named(node.inputs[0])}, whose rows are {held} already"
    if (made.kind, made.names, made.placement, made.bucket) != (
        value.kind,
        value.names,
        value.placement,
        value.bucket,
    ):
        yield (
            f"{facts.at(node)} describes its output differently from its input {facts.named(node.inputs[0])}"
        )
    yield from _shape(facts, node)
    if wanted == 1:
        return
    counts, arrived = node.inputs[1:]
    sender = dag.nodes[arrived[0]]
    if (
        not isinstance(sender, AllToAll)
        or sender.direction != COUNTS
        or sender.region != node.region
        or sender.inputs != (counts,)
    ):
        yield (
            f"{facts.at(node)} moves rows by counts that were not sent to the owners of its region's experts"
        )
    if facts.parts.get(counts, {}).keys() != facts.parts.get(node.inputs[0], {}).keys():
        yield f"{facts.at(node)} moves rows whose samples differ from the samples of its counts"
    yield from _told(facts, node, counts)


def _told(facts: Facts, node: AllToAll, counts: Ref) -> Iterable[str]:
    """The value `counts` must be the counts that the region's forward pass reads."""
    interface = facts.dag.code.interface_of((node.region, "F"))
    told = [
        ref for ref, direction in zip(interface.inputs, interface.arrives, strict=True) if direction == COUNTS
    ]
    if facts.origins.get(counts) not in told:
        yield f"{facts.at(node)} moves rows by {facts.named(counts)}, which are not the counts of its region"


def _shape(facts: Facts, node: AllToAll) -> Iterable[str]:
    """The result must have the shape that the number of owners implies.

    Rows have the shape `[experts, capacity, ...]` if all experts have the same capacity, otherwise `[rows,
    ...]`. In this second case, the spec of the result has the number of rows at the source.
    """
    dag, experts, degree = facts.dag, facts.dag.code.routed[node.region], node.mesh.size(node.axis)
    (spec,), (made,) = dag.value(node.inputs[0]).tensors, node.outputs[0].tensors
    shape = spec.shape
    if node.direction == COUNTS:
        shape = (degree, experts.count // degree)
    elif experts.even and node.direction == DISPATCH:
        shape = (shape[0] // degree, shape[1] * degree, *shape[2:])
    elif experts.even:
        shape = (shape[0] * degree, shape[1] // degree, *shape[2:])
    if made.shape != shape or made.dtype != spec.dtype:
        yield f"{facts.at(node)} declares its output as {made}, but from {spec} it makes shape {list(shape)}"


def exchanged(facts: Facts, node: Chunk) -> Iterable[str]:
    """A pass of divided experts must read exchanged rows. No other pass may read rows at their experts."""
    dag = facts.dag
    interface = dag.interface(node)
    divided = node.region in dag.meshes
    for i, ref in enumerate(node.inputs):
        direction = interface.arrives[i] if divided and i < len(interface.arrives) else ""
        source, value = dag.nodes[dag.source(ref)[0]], dag.value(ref)
        if direction:
            if not isinstance(source, AllToAll) or (source.direction, source.region) != (
                direction,
                node.region,
            ):
                yield (
                    f"{facts.at(node)} reads {facts.named(ref)} without an exchange of its rows, but the experts of this "
                    "region are on several devices: exchange the rows first"
                )
        elif any(axis not in dag.member_axes for axis, _ in value.others) != divided:
            yield f"{facts.at(node)} reads {facts.named(ref)}, whose rows are on the devices of their experts: combine them first"


# Reference semantics


def interpret(run: Reference, node: AllToAll) -> Made:
    held = [[run.values[ref, r][0] for ref in node.inputs] for r in run.group_ranks]
    return [[[x]] for x in _exchanged_rows(node, run.dag.code.routed[node.region].even, held)]


def _exchanged_rows(node: AllToAll, even: bool, held: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the rows, or counts, of each group rank after an exchange.

    Args:
        node: The exchange.
        even: Whether each expert has the same capacity.
        held: `[group rank][input]`, the tensors of the node's inputs.
    """
    made: dict[int, torch.Tensor] = {}
    for group in node.mesh.lines(node.axis):
        here = [held[r] for r in group]
        if node.direction == COUNTS:
            arrived = [torch.stack([x[0].chunk(len(group))[i] for x in here]) for i in range(len(group))]
        elif even:
            arrived = _even(node.direction == DISPATCH, [x[0] for x in here])
        else:
            arrived = _uneven(node.direction == DISPATCH, [x[0] for x in here], [x[1].tolist() for x in here])
        made |= dict(zip(group, arrived, strict=True))
    return [made[r] for r in range(len(held))]


def _even(out: bool, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange `[experts, capacity, ...]` tensors: to the owners of the experts if `out`, otherwise back."""
    split, join = (0, 1) if out else (1, 0)
    return [torch.cat([x.chunk(len(rows), split)[i] for x in rows], join) for i in range(len(rows))]


def _combined(rows: int, dispatched: int) -> str:
    return (
        f"piper.combine: got {counted(rows, 'row')} for {counted(dispatched, 'dispatched row')}. Pass one row for each "
        "dispatched row"
    )


def _uneven(out: bool, rows: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """Exchange rows by counts: to the owners of the experts if `out`, otherwise back. `counts[i][e]` is the
    number of rows that member i has for expert e. Raise an error if the counts do not add up to the number of
    rows."""
    members, experts = len(rows), len(counts[0])
    owned = [range(i * experts // members, (i + 1) * experts // members) for i in range(members)]
    # A run (e, i) is the rows of member i for expert e. These lists have the order of the runs on each
    # member. At the source, runs are sorted by expert; at the owner of the expert, by expert and then by
    # member.
    source = [[(e, i) for e in range(experts)] for i in range(members)]
    away = [[(e, i) for e in owned[k] for i in range(members)] for k in range(members)]
    before, after = (source, away) if out else (away, source)
    runs: dict[tuple[int, int], torch.Tensor] = {}
    for x, order in zip(rows, before, strict=True):
        sizes = [counts[i][e] for e, i in order]
        if sum(sizes) != x.shape[0]:
            if not out:
                raise VerificationError(f"{_combined(x.shape[0], sum(sizes))} [PIPER-C014]")
            raise VerificationError(
                f"piper.dispatch: counts {sizes} add up to {sum(sizes)}, but tokens has {x.shape[0]} rows. "
                "counts[e] is the number of rows for expert e, so counts.sum() must equal tokens.shape[0] "
                "[PIPER-C014]"
            )
        runs |= dict(zip(order, x.split(sizes), strict=True))
    return [torch.cat([runs[run] for run in order]) for order in after]


# Plans


def lower(plan: Planning, node: AllToAll) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    plan.start(node, AllToAllInstruction, reads, direction=node.direction, tensor=node.outputs[0].tensors[0])


# Runtime. At the source, rows are sorted by expert, and experts by their owner, so the rows for one member
# are contiguous. At the owner of n experts, rows are sorted by expert and then by source member, which is the
# order on one device that has all tokens.


@dataclass(frozen=True)
class Sizes:
    """A table of the numbers of rows that travel.

    Attributes:
        source: `[member][expert]`, rows that this device has for each expert of each member.
        arrived: `[member][expert]`, rows that each member has for each expert of this device.
    """

    source: Sequence[Sequence[int]]
    arrived: Sequence[Sequence[int]]


class Travel(Exchange):
    """An exchange of rows or counts, on one device. The state is the tensor that this device sends.

    Args:
        instruction: The instruction to run.
        slots: The values of the plan.
        sizes: Slot of the counts that arrived -> the sizes. The exchange of these counts sets the entry, and
            exchanges of rows read it.
    """

    kind = "all_to_all"

    def __init__(self, instruction: AllToAllInstruction, slots: Slots, sizes: dict[int, Sizes]) -> None:
        self._slots = slots
        self._direction, self._even, self._members = (
            instruction.direction,
            instruction.even,
            len(instruction.members),
        )
        self._counts = instruction.into if instruction.direction == "counts" else instruction.reads[-1].slot
        self._reads, self._sizes = instruction.reads, sizes

    def bring(self) -> torch.Tensor:
        x: torch.Tensor
        (x,) = self._slots[self._reads[0].slot]
        for read in self._reads:
            if read.last:
                self._slots[read.slot] = None
        return x

    def parts(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of a tensor that each member gets.

        Raises:
            ValueError: The counts do not add up to the number of rows.
        """
        if self._direction == "counts":
            return list(state.view(self._members, -1))
        if self._even:
            return [
                part.contiguous()
                for part in state.chunk(self._members, 0 if self._direction == "dispatch" else 1)
            ]
        sizes = self._sizes[self._counts]
        runs = sizes.source if self._direction == "dispatch" else sizes.arrived
        total = sum(map(sum, runs))
        if total != state.shape[0]:
            if self._direction != "dispatch":
                raise ValueError(_combined(state.shape[0], total))
            raise ValueError(
                f"piper.dispatch: counts add up to {total}, but tokens has {state.shape[0]} rows. counts[e] "
                "is the number of rows for expert e, so counts.sum() must equal tokens.shape[0]"
            )
        if self._direction == "dispatch":
            return list(state.contiguous().split([sum(run) for run in runs]))
        # The rows are sorted by expert and then by source member. So with n members, every n-th part goes to
        # the same member.
        parts = state.split([n for of_expert in zip(*runs, strict=True) for n in of_expert])
        return [torch.cat(parts[i :: self._members]) for i in range(self._members)]

    def room(self, state: torch.Tensor, parts: Sequence[Any]) -> list[torch.Tensor]:
        if self._direction == "counts" or self._even:
            return [torch.empty_like(part) for part in parts]
        sizes = self._sizes[self._counts]
        runs = [sum(run) for run in (sizes.arrived if self._direction == "dispatch" else sizes.source)]
        return list(state.new_empty(sum(runs), *state.shape[1:]).split(runs))

    def join(self, state: torch.Tensor, received: Sequence[torch.Tensor]) -> Bundle:
        return (self._joined(received, state),)

    def _joined(self, parts: Sequence[torch.Tensor], brought: torch.Tensor) -> torch.Tensor:
        """Return the tensor that consists of the parts received from all members. For counts, also record the
        numbers of rows for later exchanges."""
        if self._direction == "counts":
            arrived = torch.stack(list(parts))
            self._sizes[self._counts] = Sizes(brought.view(self._members, -1).tolist(), arrived.tolist())
            return arrived
        if self._even:
            return torch.cat(list(parts), 1 if self._direction == "dispatch" else 0)
        if self._direction == "combine":
            return torch.cat(list(parts))
        arrived_sizes = self._sizes[self._counts].arrived
        runs = [part.split(list(sizes)) for part, sizes in zip(parts, arrived_sizes, strict=True)]
        return torch.cat([run for of_expert in zip(*runs, strict=True) for run in of_expert])


def bind_all_to_all(instruction: AllToAllInstruction, on: Binding) -> Bound | None:
    sizes = on.common.setdefault("all_to_all", {})
    return on.endpoint.collective(instruction, Travel(instruction, on.slots, sizes), on.slots)


register_operation(
    Operation(AllToAll, check, interpret, lower, bind={AllToAllInstruction: bind_all_to_all}, alike=True)
)
