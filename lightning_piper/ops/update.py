"""Sums of gradients for the optimizer, over slices and regions, and the last values of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch

from lightning_piper.common.limits import shown
from lightning_piper.errors import VerificationError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.nodes import IssuePriority, Node, Ref
from lightning_piper.ir.values import Kind, Partial, Sharded, Slice
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Operation,
    Planning,
    Slots,
    about,
    nothing,
    register_operation,
)
from lightning_piper.ops.facts import Contributions, Facts, Origin, names_of
from lightning_piper.ops.instruction import Instruction, Read
from lightning_piper.ops.reference import Bundle, Made, Reference, on_each_rank, sum_in_order


@dataclass(frozen=True, kw_only=True)
class Accumulate(Node):
    """A node that sums one region's gradients of the same parameters over slices, in the order of inputs."""

    placed_by_reader = True  # a split also joins gradients of an activation with it, which a chunk then reads


@dataclass(frozen=True, kw_only=True)
class Update(Node):
    """A node that outputs the sum of its inputs to the optimizer or the module.

    The inputs are gradients of the same parameters, from each region and device group that uses the
    parameters. Or the only input is the last value of buffers.
    """

    turn = IssuePriority.DEFERRED


@dataclass(frozen=True, kw_only=True)
class Add(Instruction):
    """An instruction that makes one step of a sum.

    The first step adds two terms into new tensors, because the first term may be an alias of other tensors.
    Later steps add to the sum in place, because the sum shares memory with no other tensor. The slot of a sum
    is the only kind of slot that is written more than once.

    Attributes:
        in_place: Whether to add the only bundle that the instruction reads to the slot's content.
        bucket, take: If the sum is a flat tensor, its bucket and the terms' tensors as in `PackInstruction`.
    """

    op: ClassVar[str] = "add"
    in_place: bool = False
    bucket: Bucket | None = None
    take: tuple[int | None, ...] = ()

    def details(self) -> list[str]:
        if self.in_place:
            return [f"s{self.writes[0]} += {self.reads[0]}"]
        return [f"s{self.writes[0]} = {self.reads[0]} + {self.reads[1]}"]


@dataclass(frozen=True, kw_only=True)
class Deliver(Instruction):
    """An instruction that outputs gradients to the optimizer, buffers to the module, or a step's results.

    Attributes:
        kind: `grad`, `buffer` or `result`.
        names: Names of the parameters, buffers or results, one for each tensor.
        source: `sum` if the tensors are sums made here, which no other value shares; `chunk` if a chunk made
            them, so that they may be aliases of each other or of the chunk's inputs; `peer` if they were
            received; `host` if they were copied from or to the host.
        bucket: The bucket if the bundle is a flat tensor or a shard of one; otherwise None.
        shard: Index of the shard; None for a whole flat tensor.
    """

    op: ClassVar[str] = "deliver"
    kind: str
    names: tuple[str, ...]
    source: str
    bucket: Bucket | None = None
    shard: int | None = None

    def details(self) -> list[str]:
        return [*super().details(), "as", f"{self.kind}:" + ",".join(self.names)]


# Static rules


def check_accumulate(facts: Facts, node: Accumulate) -> Iterable[str]:
    """The node must sum one output of a pass over slices, and count no sample twice. The gradient of an
    activation must have all samples from the first slice to the last."""
    facts.forward(node)
    total: Contributions = {}
    for ref in node.inputs:
        if facts.origins.get(ref) != facts.origins.get(node.inputs[0]):
            yield f"{facts.at(node)} adds {facts.named(ref)} to {facts.named(node.inputs[0])}"
        for part, weight in facts.parts.get(ref, {}).items():
            total[part] = total.get(part, Fraction(0)) + weight
    # A sum of gradients of a parameter may leave out slices that another sum adds: on another device group,
    # or before another reduce-scatter. The gradient of a value that a split part of the step reads whole
    # covers all samples of this part.
    value = facts.dag.value(node.inputs[0])
    whole = Slice(0, facts.dag.local_batch_size)
    if value.kind == Kind.COTANGENT and total:
        whole = Slice(min(total).start, max(total).stop)
    # `check_update` checks that the sums of a parameter's gradients together have all samples.
    if problem := facts.uncovered(facts.share, total, whole, some=value.kind == Kind.GRAD):
        yield f"gradient of {names_of(value.names)} ({facts.at(node)}): {problem}"
    complete = facts.uncovered(facts.share, total, whole) is None
    facts.parts[node.id, 0] = {whole: facts.share(whole)} if complete else total
    for ref in node.inputs:
        other = facts.dag.value(ref)
        if (other.bucket, other.placement) != (value.bucket, value.placement):
            yield (
                f"{facts.at(node)} adds {facts.named(ref)} with the placement {other.placement} to a value with the "
                f"placement {value.placement}{'' if other.bucket == value.bucket else ', of another bucket'}"
            )
    if node.outputs[0] != value:
        yield f"{facts.at(node)} describes its sum differently from its terms"


def check_update(facts: Facts, node: Update) -> Iterable[str]:
    """The node must sum the gradients that all regions make of the node's parameters, with each sample once.
    For buffers, the node must read only the value after the last sample."""
    value = facts.dag.value(node.inputs[0])
    if value.kind == Kind.BUFFER:
        if len(node.inputs) != 1:
            yield (
                f"buffers {names_of(value.names)}: {facts.at(node)} has {len(node.inputs)} values, but it needs only "
                "the last one"
            )
        last = max(facts.parts[node.inputs[0]]).stop
        if last != facts.dag.local_batch_size:
            what = f"the value after sample {last}, not after {facts.dag.local_batch_size}"
            yield f"buffers {names_of(value.names)}: {facts.at(node)} keeps {what}"
        return
    together: dict[Origin, Contributions] = {}
    for ref in node.inputs:
        of_region = together.setdefault(facts.origins[ref], {}) if ref in facts.origins else {}
        for part, weight in facts.parts.get(ref, {}).items():
            of_region[part] = of_region.get(part, Fraction(0)) + weight
    for origin, parts in together.items():
        if problem := facts.uncovered(facts.share, parts):
            yield (
                f"gradient of {names_of(value.names)} ({facts.at(node)}): of {facts.pass_of(origin)}, "
                f"{problem}"
            )
    wanted = sorted({origin for name in value.names for origin in facts.gradients.get(name, ())})
    found = sorted(together)
    if found != wanted:
        takes, should = (", ".join(map(facts.pass_of, origins)) for origins in (found, wanted))
        yield (
            f"gradient of {names_of(value.names)} ({facts.at(node)}): the node sums {takes}, but one device sums "
            f"{should}"
        )
    for ref in node.inputs:
        other = facts.dag.value(ref)
        if (other.names, other.bucket) != (value.names, value.bucket):
            yield (
                f"gradient of {names_of(value.names)} ({facts.at(node)}): the node adds {facts.named(ref)}, which "
                "is in another bucket"
            )


# Reference semantics


@on_each_rank
def interpret_accumulate(run: Reference, node: Accumulate, inputs: list[Bundle]) -> list[Bundle]:
    return [sum_in_order(inputs)]


def interpret_update(run: Reference, node: Update) -> Made:
    """Record the gradients of whole parameters in `run.grads`, or the buffers in `run.buffers`. Return an
    empty list for each group rank. Raise an error if group ranks have different values."""
    value = run.dag.value(node.inputs[0])
    summands: list[list[Bundle]] = []  # for each input, its value on each group rank
    for ref in node.inputs:
        held = [run.values[ref, r] for r in run.group_ranks]
        placement = run.dag.value(ref).placement
        if isinstance(placement, Partial):
            # The program is not complete yet, so no node sums this value over the replicas.
            groups = [run.dag.mesh_of(value.names[0]).line(DATA, r) for r in run.group_ranks]
            held = [sum_in_order([held[s] for s in group]) for group in groups]
        elif isinstance(placement, Sharded):
            assert value.bucket is not None
            held = [[torch.cat([held[s][0] for s in value.bucket.shard_group(r)])] for r in run.group_ranks]
        summands.append(held)
    found = [sum_in_order([held[r] for held in summands]) for r in run.group_ranks]
    if value.bucket is not None:  # the optimizer takes gradients in the parameters' own dtype
        own = [i for i, name in enumerate(value.bucket.names) if name in value.names]
        views = [value.bucket.views(flat[0]) for flat in found]
        found = [[each[i].to(value.bucket.tensors[i].dtype) for i in own] for each in views]
        if value.bucket.degree > 1:  # each rank has one part along the bucket's axes
            held_as = [value.bucket.placement_of(name) for name in value.names]
            found = [
                _joined([found[r] for r in group], held_as)
                for group in value.bucket.mesh.blocks(value.bucket.along)
            ]
    into = run.buffers if value.kind == Kind.BUFFER else run.grads
    for bundle in found:
        for name, tensor in zip(value.names, bundle, strict=True):
            if name in into and not torch.equal(into[name], tensor):
                raise _differs(run.dag, value.kind, name)
            into[name] = tensor
    return [[] for _ in run.group_ranks]


def _differs(dag: TrainingDAG, kind: Kind, name: str) -> VerificationError:
    """Return the error for a gradient or a buffer whose values on its devices are not equal."""
    updates = [node for node in dag.of_type(Update) if name in dag.value(node.inputs[0]).names]
    devices = sorted({device for node in updates for device in node.devices})
    what, fix = "gradient of", "sum this value over the devices"
    if kind != Kind.GRAD:
        what, fix = "new value of the buffer", "compute this value from the samples of all devices"
    return VerificationError(
        f"the {what} {name!r} differs between the devices {shown(devices)}. If you wrote a directive, make it {fix}. "
        "Otherwise, report this [PIPER-V001]"
    )


def _joined(parts: list[Bundle], held_as: Sequence[Sharded]) -> Bundle:
    """Join parts to whole tensors."""
    return [placement.joined(xs) for xs, placement in zip(zip(*parts, strict=True), held_as, strict=True)]


# Plans


def produce_accumulate(plan: Planning, node: Accumulate, ref: Ref) -> None:
    # The sum is emitted at its first read, because an earlier sum may have to wait for a term.
    plan.bind(ref, plan.add_up(node))


def lower_update(plan: Planning, node: Update) -> None:
    """Complete the sum of the inputs, and emit the instruction that outputs the sum."""
    value = plan.dag.value(node.inputs[0])
    total = plan.add_up(node)
    shard = plan.group_rank if isinstance(value.placement, Sharded) else None
    plan.emit(
        Deliver(
            **about(node),
            reads=(Read(total),),
            kind=value.kind,
            names=value.names,
            source=plan.source(total),
            bucket=value.bucket,
            shard=shard,
        )
    )


# Runtime


def bind_add(instruction: Add, on: Binding) -> Bound:
    """Return the function that makes one step of a sum, except for the tensors that chunks add themselves."""
    # Indices of the tensors that a chunk's code adds to the sum itself, which saves memory for the term.
    there: frozenset[int] = on.chunks.inplace.get(instruction.node, frozenset())
    if instruction.bucket is not None:
        return _bind_add_flat(instruction, instruction.bucket, on.slots, on.endpoint.flat, there)
    if instruction.in_place:
        return _bind_add_in_place(instruction, on.slots, there)
    (left, right), into, slots = instruction.reads, instruction.into, on.slots

    def add() -> None:
        a, b = list(slots[left.slot]), list(slots[right.slot])
        if left.last:
            slots[left.slot] = None
        if right.last:
            slots[right.slot] = None
        made = slots[into]  # chunks may have written elements of the sum; if not, None
        a.reverse()
        b.reverse()
        total: list[torch.Tensor] = []
        while a:  # each pair of terms is freed before the next sum is made
            x, y = a.pop(), b.pop()
            total.append(made[len(total)] if len(total) in there else torch.add(x, y))
        slots[into] = tuple(total)

    return add


def _bind_add_in_place(instruction: Add, slots: Slots, there: frozenset[int]) -> Bound:
    """Bind a later step of a sum of bundles. `there`: as in `_bind_add_flat`."""
    (term,), into = instruction.reads, instruction.into
    source, last = term.slot, term.last

    def add() -> None:
        for i, (x, y) in enumerate(zip(slots[into], slots[source], strict=True)):
            if i not in there:
                x.add_(y)
        if last:
            slots[source] = None

    return add


def _bind_add_flat(
    instruction: Add,
    bucket: Bucket,
    slots: Slots,
    new: Callable[[Bucket], torch.Tensor],
    there: frozenset[int],
) -> Bound:
    """Bind one step of a sum in a flat tensor. The terms are bundles.

    Args:
        new: Makes the flat tensor of a bucket.
        there: Indices of the tensors that chunks add to the sum themselves.
    """
    reads, into = instruction.reads, instruction.into
    take = [(index, i) for index, i in enumerate(instruction.take) if i is not None and index not in there]
    absent = [index for index, i in enumerate(instruction.take) if i is None]
    alike = all(spec.dtype == bucket.dtype for spec in bucket.tensors)

    def read(k: int) -> list[torch.Tensor]:
        bundle = slots[reads[k].slot]
        if reads[k].last:
            slots[reads[k].slot] = None
        return [bundle[i] for _, i in take]

    def views(flat: torch.Tensor) -> list[torch.Tensor]:
        found = bucket.views(flat)
        return [found[index] for index, _ in take]

    def begin() -> None:
        flat = slots[into][0] if there else new(bucket)
        if absent:
            found = bucket.views(flat)
            for index in absent:
                found[index].zero_()
        for view, x, y in zip(views(flat), read(0), read(1), strict=True):
            if alike:
                torch.add(x, y, out=view)
            else:  # add in the dtype of the sum instead of the dtype of the terms
                view.copy_(x).add_(y)
        slots[into] = (flat,)

    def add() -> None:
        for view, x in zip(views(slots[into][0]), read(0), strict=True):
            view.add_(x)

    return add if instruction.in_place else begin


def bind_deliver(instruction: Deliver, on: Binding) -> Any:
    return on.step_outputs.bind_deliver(instruction, on.slots, on.endpoint.hands_over)


register_operation(
    Operation(
        Accumulate,
        check_accumulate,
        interpret_accumulate,
        nothing,
        produce_accumulate,
        bind={Add: bind_add},
        adds_up=True,
        alike=True,
    )
)
register_operation(
    Operation(Update, check_update, interpret_update, lower_update, bind={Deliver: bind_deliver}, alike=True)
)
