"""Sharded parameters: the shards that the optimizer updated, and the gather of a whole bucket from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_piper.ir.buckets import packed_params
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import IssuePriority, Node
from lightning_piper.ir.policies import is_narrower
from lightning_piper.ir.values import Kind, Replicated, Sharded, TensorSpec
from lightning_piper.ops.base import (
    Binding,
    Bound,
    Bundle,
    Exchange,
    Operation,
    Planning,
    bucket_of,
    register_operation,
)
from lightning_piper.ops.facts import Facts, carries
from lightning_piper.ops.instruction import Collective
from lightning_piper.ops.reference import Bundle as Held
from lightning_piper.ops.reference import Made, Reference


@dataclass(frozen=True, kw_only=True)
class Parameters(Node):
    """A node for the shards of a bucket of parameters after the optimizer's last update.

    The node does not read values. Its output is `Sharded`.

    Attributes:
        kept: Whether every member keeps the memory of the whole bucket between steps. At the start of a step,
            only its own shard is up to date.
        gathered_per_use: Whether each chunk that reads the parameters has a gather of its own.
    """

    turn = IssuePriority.FIRST

    kept: bool
    gathered_per_use: bool

    @property
    def per_use(self) -> bool:
        return self.gathered_per_use


@dataclass(frozen=True, kw_only=True)
class AllGather(Node):
    """A node that gathers a bucket's shards on every member, from a `Sharded` to a `Replicated` value.

    If the output is `rounded`, each member rounds its shard, the shards travel in this dtype, and the output has
    the rounded numbers in the parameters' dtype.
    """

    turn = IssuePriority.PREFETCH
    communicates = True

    @property
    def details(self) -> str:
        rounded = self.outputs[0].rounded
        return "" if rounded is None else f"in {str(rounded).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True)
class AllGatherInstruction(Collective):
    """An instruction that gathers a bucket's shards from all members, and outputs views of the parameters.

    Attributes:
        kept: Whether to gather into the flat tensor that this device keeps between steps, which already has
            this device's shard.
        rounded: Dtype to which the members round their shards, and in which the shards travel; None for the
            parameters' dtype.
    """

    op: ClassVar[str] = "all_gather"
    kept: bool
    rounded: torch.dtype | None = None

    @property
    def gathers(self) -> bool:
        return True

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Specs of the memory that the gather allocates and that stays until the last read; empty if the device
        keeps this memory between steps."""
        assert self.bucket is not None
        return () if self.kept else (self.bucket.whole,)

    @property
    def passing(self) -> tuple[TensorSpec, ...]:
        """Specs of the memory that the gather also allocates, and frees when the wait for it ends: the rounded
        shard and the rounded bucket."""
        if self.rounded is None:
            return ()
        assert self.bucket is not None
        bucket = self.bucket.in_dtype(self.rounded)
        return (bucket.part, bucket.whole)

    @property
    def nbytes(self) -> int:
        if self.rounded is None:
            return super().nbytes
        assert self.bucket is not None
        return self.bucket.numel * self.rounded.itemsize

    def details(self) -> list[str]:
        rounded = [] if self.rounded is None else [f"in={str(self.rounded).removeprefix('torch.')}"]
        return [*super().details(), *rounded]


def check_parameters(facts: Facts, node: Parameters) -> Iterable[str]:
    """The node must make a shard of a bucket of parameters, in the dtype of the parameters."""
    value = node.outputs[0]
    if value.bucket is None or value.kind != Kind.PARAM or value.placement != Sharded(0):
        yield f"{facts.at(node)} does not make a shard of a bucket of parameters"
    elif any(spec.dtype != value.bucket.dtype for spec in value.bucket.tensors):
        yield (
            f"{facts.at(node)} keeps parameters in {value.bucket.dtype}, but some of them have another dtype"
        )
    elif node.kept and node.per_use:
        yield f"{facts.at(node)} keeps the whole bucket between steps, but every use gathers it anew"


def check_all_gather(facts: Facts, node: AllGather) -> Iterable[str]:
    """The node must gather a bucket's shards that lie on its own devices. It must not round them if it gathers into
    memory that has the optimizer's own shard."""
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    source = facts.dag.nodes[node.inputs[0][0]]
    if value.placement != Sharded(0) or made.placement != Replicated():
        yield (
            f"{facts.at(node)} gathers {value.label} with the placement {value.placement} into {made.placement}, but "
            "a gather makes R from S(0)"
        )
    if value.bucket is None or carries(made) != carries(value):
        yield f"{facts.at(node)} describes its output differently from its input {value.label}"
    if node.devices != source.devices:
        yield f"{facts.at(node)} gathers shards that lie on devices {list(source.devices)}"
    if made.rounded is not None and (not isinstance(source, Parameters) or source.kept):
        yield (
            f"{facts.at(node)} rounds {value.label} to {made.rounded} in memory that is kept between steps, so the "
            "optimizer would update rounded parameters"
        )
    if (
        made.rounded is not None
        and value.bucket is not None
        and not is_narrower(made.rounded, value.bucket.dtype)
    ):
        yield f"{facts.at(node)} rounds {value.label} of {value.bucket.dtype} to {made.rounded}, which does not round"


def interpret_parameters(run: Reference, node: Parameters) -> Made:
    bucket = bucket_of(node)

    def shard(replica: int) -> Held:
        flat = packed_params(bucket, run.tensors, replica, run.tensors[bucket.names[0]].device)
        return [flat.chunk(bucket.members)[bucket.member(replica)]]

    return [[shard(replica)] for replica in run.group_ranks]


def interpret_all_gather(run: Reference, node: AllGather) -> Made:
    bucket, rounded = bucket_of(node), node.outputs[0].rounded
    wholes = [
        torch.cat([run.values[node.inputs[0], s][0] for s in bucket.shard_group(r)]) for r in run.group_ranks
    ]
    return [[[whole if rounded is None else whole.to(rounded).to(whole.dtype)]] for whole in wholes]


def rounded_params(dag: TrainingDAG) -> dict[str, torch.dtype]:
    """Return the parameters that gathers round before chunks read them: name -> dtype."""
    return {
        name: value.rounded
        for gather in dag.of_type(AllGather)
        if (value := gather.outputs[0]).rounded is not None
        for name in value.names
    }


def lower_all_gather(plan: Planning, node: AllGather) -> None:
    # The gather does not read a slot, because the shard is not a value of the step. If the device does not
    # keep the bucket's memory, the gather is issued on the stream of its reader and uses memory of this
    # stream. So a bucket arrives only after the stream has read the earlier bucket whose memory it gets.
    kept, rounded = plan.shards[bucket_of(node)], node.outputs[0].rounded
    stream = node.stream if kept else plan.dag.users(node)[0].stream
    plan.start(
        node, AllGatherInstruction, (), stream=stream, bucket=bucket_of(node), kept=kept, rounded=rounded
    )


class _AllGather(Exchange):
    """A gather. Its state is [the device's shard, the new flat tensor for all shards]. The second item is
    None before `room` allocates it, and if the device keeps the flat tensor. Both are in the dtype of the
    messages.

    Args:
        kept: The flat tensor of the bucket if the device keeps it between steps, otherwise only the device's
            shard.
        own: Index of the device's shard.
    """

    kind = "all_gather"

    def __init__(self, instruction: AllGatherInstruction, kept: torch.Tensor, own: int) -> None:
        assert instruction.bucket is not None
        self._bucket, self._count, self._own, self._kept = (
            instruction.bucket,
            len(instruction.members),
            own,
            kept,
        )
        self._dtype = instruction.rounded or instruction.bucket.dtype
        self._shards = kept.chunk(self._count) if instruction.kept else None
        alone = self._count == 1 and instruction.rounded is None
        self._views = instruction.bucket.views(kept) if instruction.kept or alone else None
        self._shard = kept if self._shards is None else self._shards[own]

    def bring(self) -> list[Any]:
        return [self._shard.to(self._dtype), None]  # the shard itself, or a rounded copy

    def parts(self, state: list[Any]) -> Sequence[torch.Tensor]:
        return [state[0]] * self._count

    def room(self, state: list[Any], parts: Sequence[Any]) -> list[torch.Tensor]:
        if self._shards is not None:
            return list(self._shards)
        state[1] = torch.empty(self._bucket.numel, dtype=self._dtype, device=self._kept.device)
        return list(state[1].chunk(self._count))

    def join(self, state: list[Any], received: Sequence[torch.Tensor]) -> Bundle:
        if self._views is not None:
            for shard, part in zip(self._shards or (), received, strict=False):
                if shard.data_ptr() != part.data_ptr():  # a part that is already in place needs no copy
                    shard.copy_(part)
            return self._views
        whole = torch.cat(list(received)) if state[1] is None else state[1]
        return self._bucket.views(whole.to(self._bucket.dtype))


def bind_all_gather(instruction: AllGatherInstruction, on: Binding) -> Bound | None:
    assert instruction.bucket is not None
    exchange = _AllGather(instruction, on.shards[instruction.bucket], instruction.members.index(on.own))
    return on.endpoint.collective(instruction, exchange, on.slots)


register_operation(Operation(Parameters, check_parameters, interpret_parameters, alike=True))
register_operation(
    Operation(
        AllGather,
        check_all_gather,
        interpret_all_gather,
        lower_all_gather,
        bind={AllGatherInstruction: bind_all_gather},
        alike=True,
    )
)
