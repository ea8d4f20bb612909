"""Sums over replicas: each member gets the whole bucket, or its shard. If each group of replicas has all shards, a
further sum adds the shards of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_piper.ir.mesh import GROUPS
from lightning_piper.ir.nodes import IssuePriority, Node
from lightning_piper.ir.values import Partial, Replicated, Sharded, TensorSpec
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Bundle,
    Exchange,
    Operation,
    Planning,
    bucket_of,
    register_operation,
    take,
)
from lightning_piper.ops.facts import Facts, carries
from lightning_piper.ops.instruction import Collective
from lightning_piper.ops.reference import Made, Reference


@dataclass(frozen=True, kw_only=True)
class AllReduce(Node):
    """A node that sums the tensors of its group's members, from `Partial` to `Replicated` values."""

    turn = IssuePriority.ON_DEMAND
    communicates = sums = True
    reads_from = "members"
    shows_tags = False


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Node):
    """A node that sums a bucket over its group and leaves each member its shard: `Partial` to `Sharded`."""

    turn = IssuePriority.ON_DEMAND
    communicates = sums = True


@dataclass(frozen=True, kw_only=True)
class AllReduceShards(Node):
    """A node that sums the shards of a bucket over the groups of the bucket's mesh: along `GROUPS` from `Partial` to
    replicated. The members are the group ranks with the same shard."""

    turn = IssuePriority.ON_DEMAND
    communicates = sums = True

    @property
    def label(self) -> str:
        return f"allreduce.{GROUPS}"

    def members(self, replica: int) -> tuple[int, ...]:
        return tuple(self.devices[group_rank] for group_rank in bucket_of(self).same_shard(replica))


@dataclass(frozen=True, kw_only=True)
class AllReduceInstruction(Collective):
    """An instruction that adds up bundles (zeros if it does not read any), and sums them over the members.

    Attributes:
        tensors: Specs of the summed tensors.
        bucket: The bucket of the flat tensors, or shards of them, that the instruction reads. If it reads only one
            tensor and no later instruction reads this tensor, the sum may overwrite the tensor. None: the
            tensors are not in a bucket.
    """

    op: ClassVar[str] = "reduce"
    rings: ClassVar[int] = 2  # a reduce-scatter and an all-gather
    sums: ClassVar[bool] = True
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, kw_only=True)
class AllReduceShardsInstruction(AllReduceInstruction):
    """An instruction that sums shards over groups of replicas. Its members may be on different nodes, so figures and
    recordings distinguish it from the sums within a group."""

    op: ClassVar[str] = "reduce_groups"
    color: ClassVar[str] = "#8e9ad6"


@dataclass(frozen=True, kw_only=True)
class ReduceScatterInstruction(Collective):
    """An instruction that sums a flat tensor over the members, and leaves each member its shard."""

    op: ClassVar[str] = "reduce_scatter"
    sums: ClassVar[bool] = True


# Static rules


def check_all_reduce(facts: Facts, node: AllReduce) -> Iterable[str]:
    """The node must sum terms that are not yet summed over replicas."""
    yield from summed_once(facts, node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if not isinstance(made.placement, Replicated):
        yield f"{facts.at(node)} outputs {made.placement} after its sum"
    if (*carries(made), made.tensors) != (*carries(value), value.tensors):
        yield (
            f"{facts.at(node)} describes its output differently from its input {facts.named(node.inputs[0])}"
        )
    if made.bucket is not None and made.bucket.groups > 1:
        yield (
            f"{facts.at(node)} sums {value.label} over the {made.bucket.members} replicas of a group, but there are "
            f"{made.bucket.groups} groups: sum shards over a group, and then over the groups"
        )
    facts.forward(node)


def check_reduce_scatter(facts: Facts, node: ReduceScatter) -> Iterable[str]:
    """The node must sum a bucket that is not yet summed over replicas, and leave each replica its shard."""
    yield from summed_once(facts, node)
    facts.forward(node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if value.bucket is None or made.placement != Sharded(0):
        yield f"{facts.at(node)} does not make a shard of the bucket that it sums"
    elif (*carries(made)[:3], made.others) != (*carries(value)[:3], value.bucket.others_before_groups):
        yield f"{facts.at(node)} describes its shard differently from the bucket that it sums"


def check_all_reduce_shards(facts: Facts, node: AllReduceShards) -> Iterable[str]:
    """The node must sum shards that the groups have not summed yet, once."""
    ref = node.inputs[0]
    value, made, source = facts.dag.value(ref), node.outputs[0], facts.dag.nodes[ref[0]]
    facts.forward(node)
    if len(node.inputs) != 1 or source.devices != node.devices:
        yield f"{facts.at(node)} sums {facts.named(ref)}, which lies on devices {list(source.devices)}"
    if value.bucket is None or value.placement != Sharded(0):
        yield f"{facts.at(node)} sums {facts.named(ref)}, which is not a shard of a bucket"
    elif (GROUPS, Partial()) not in value.others:
        yield f"{facts.at(node)} sums {facts.named(ref)} over groups that all have the same shard of it"
    elif made != replace(value, others=value.bucket.others):
        yield f"{facts.at(node)} describes its output differently from its input {facts.named(ref)}"


def summed_once(facts: Facts, node: Node) -> Iterable[str]:
    """The inputs of a sum must be terms that are not yet summed over the members, and be on all members."""
    for ref in node.inputs:
        value, source = facts.dag.value(ref), facts.dag.nodes[ref[0]]
        if not isinstance(value.placement, Partial):
            held = "a shard of this value" if isinstance(value.placement, Sharded) else "the whole value"
            yield f"{facts.at(node)} sums {facts.named(ref)} over devices that each hold {held}, not a term of a sum"
        if not node.everywhere and (len(node.inputs) != 1 or source.devices != node.devices):
            yield f"{facts.at(node)} sums {facts.named(ref)}, which lies on devices {list(source.devices)}"


# Reference semantics


def interpret_all_reduce(run: Reference, node: AllReduce) -> Made:
    bucket = node.outputs[0].bucket
    return [
        [run.sum_over(node, run.group_ranks if bucket is None else bucket.shard_group(r))]
        for r in run.group_ranks
    ]


def interpret_reduce_scatter(run: Reference, node: ReduceScatter) -> Made:
    bucket = bucket_of(node)
    return [
        [[run.sum_over(node, bucket.shard_group(r))[0].chunk(bucket.members)[bucket.member(r)]]]
        for r in run.group_ranks
    ]


def interpret_all_reduce_shards(run: Reference, node: AllReduceShards) -> Made:
    bucket = bucket_of(node)
    return [[run.sum_over(node, bucket.same_shard(r))] for r in run.group_ranks]


# Plans


def lower_all_reduce(plan: Planning, node: Node) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs if plan.has(ref))
    value, over_groups = node.outputs[0], isinstance(node, AllReduceShards)
    kind = AllReduceShardsInstruction if over_groups else AllReduceInstruction
    plan.start(node, kind, reads, tensors=value.tensors, bucket=value.bucket)


def lower_reduce_scatter(plan: Planning, node: ReduceScatter) -> None:
    # Issue the sum on the stream that made the bucket, so that this stream gets the bucket's memory back
    # after it has waited for the sum.
    read = plan.read(node.inputs[0], node)
    plan.start(
        node, ReduceScatterInstruction, (read,), stream=plan.stream_of(read.slot), bucket=bucket_of(node)
    )
    plan.wait_for_earlier(node)


# Runtime


def read_sum(instruction: AllReduceInstruction, on: Binding) -> Callable[[], Bundle]:
    """Return a function that returns this device's term of a sum, in tensors that no other value shares."""
    reads, specs, slots = instruction.reads, instruction.tensors, on.slots
    if instruction.bucket is not None and len(reads) == 1 and reads[0].last:
        return take(instruction, slots)  # No other instruction reads the flat tensor.

    def total() -> Bundle:
        if not reads:
            return tuple(torch.zeros(s.shape, dtype=s.dtype, device=on.device) for s in specs)
        result = tuple(x.clone() for x in slots[reads[0].slot])
        for read in reads[1:]:
            for x, y in zip(result, slots[read.slot], strict=True):
                x.add_(y)
        for read in reads:
            if read.last:
                slots[read.slot] = None
        return result

    return total


class _AllReduce(Exchange):
    """An all-reduce whose state is this device's term."""

    kind = "all_reduce"

    def __init__(self, instruction: AllReduceInstruction, on: Binding) -> None:
        self._count, self._sum = len(instruction.members), read_sum(instruction, on)

    def bring(self) -> Bundle:
        return self._sum()

    def parts(self, state: Bundle) -> Sequence[Bundle]:
        return [state] * self._count

    def join(self, state: Bundle, received: Sequence[Bundle]) -> Bundle:
        return summed(received)


class _ReduceScatter(Exchange):
    """A reduce-scatter whose state is [the flat tensor, the tensor into which the sum is written].

    The second item is the buffer that receives the part of member 0, or on member 0 the part of member 1. It
    is None if the transport does not call `room`. The sum is then a new tensor.
    """

    kind = "reduce_scatter"

    def __init__(self, instruction: ReduceScatterInstruction, on: Binding) -> None:
        self._count, self._own = len(instruction.members), instruction.members.index(on.own)
        self._take = take(instruction, on.slots)

    def bring(self) -> list[Any]:
        return [*self._take(), None]

    def parts(self, state: list[Any]) -> Sequence[torch.Tensor]:
        return state[0].chunk(self._count)  # type: ignore[no-any-return]

    def room(self, state: list[Any], parts: Sequence[Any]) -> list[torch.Tensor]:
        rooms = [part if i == self._own else torch.empty_like(part) for i, part in enumerate(parts)]
        state[1] = rooms[0 if self._own else 1]
        return rooms

    def join(self, state: list[Any], received: Sequence[torch.Tensor]) -> Bundle:
        return summed([(part,) for part in received], into=(state[1],))


def summed(parts: Sequence[Bundle], into: Sequence[torch.Tensor | None] | None = None) -> Bundle:
    """Return the sum from the first member to the last, in new tensors. With one part, return a copy of it.

    Args:
        into: For several parts: the tensors to write the sums to. They may be the tensors of one of the first
            two parts. An entry None asks for a new tensor.
    """
    if len(parts) == 1:
        return tuple(x.clone() for x in parts[0])
    total = tuple(
        torch.add(x, y, out=z)
        for x, y, z in zip(parts[0], parts[1], into or [None] * len(parts[0]), strict=True)
    )
    for part in parts[2:]:
        for x, y in zip(total, part, strict=True):
            x.add_(y)
    return total


def bind_all_reduce(instruction: AllReduceInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _AllReduce(instruction, on), on.slots)


def bind_reduce_scatter(instruction: ReduceScatterInstruction, on: Binding) -> Bound | None:
    return on.endpoint.collective(instruction, _ReduceScatter(instruction, on), on.slots)


register_operation(
    Operation(
        AllReduce,
        check_all_reduce,
        interpret_all_reduce,
        lower_all_reduce,
        bind={AllReduceInstruction: bind_all_reduce},
        alike=True,
    )
)
register_operation(
    Operation(
        ReduceScatter,
        check_reduce_scatter,
        interpret_reduce_scatter,
        lower_reduce_scatter,
        bind={ReduceScatterInstruction: bind_reduce_scatter},
        alike=True,
    )
)
register_operation(
    Operation(
        AllReduceShards,
        check_all_reduce_shards,
        interpret_all_reduce_shards,
        lower_all_reduce,
        bind={AllReduceShardsInstruction: bind_all_reduce},
        alike=True,
    )
)
