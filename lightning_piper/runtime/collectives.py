"""Sharded buckets between processes: start an operation, and finish it when its works are done.

gloo has no reduce-scatter of its own (torch makes it from an all-reduce, twice the bytes), and its all-gather copies. So shards
go straight from each member to the one that wants them, and are added in the order of the members: the bits do not depend on
which came first. NCCL has both, and takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.plan.instructions import AllGather, ReduceScatter
from lightning_piper.runtime.bundles import take
from lightning_piper.runtime.transport import Bound, Bundle, Slots

Finish = Callable[[Any], Bundle]


class Members:
    """A communicator and its members, seen from one of them.

    Attributes:
        group: the communicator.
        ranks: rank in it of each member, in the order of the members.
        own: position of this process.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int]) -> None:
        self.group, self.ranks = group, ranks
        self.own = ranks.index(dist.get_rank(group))

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.ranks)) if i != self.own]

    def exchange(self, sent: list[torch.Tensor], received: list[torch.Tensor]) -> list[Any]:
        """Start to send `sent[i]` to member i and to receive its answer into `received[i]`, for all others; nothing, if empty."""
        works: list[Any] = [self.group.recv([received[i]], self.ranks[i], 0) for i in self.others if received[i].numel()]
        return works + [self.group.send([sent[i]], self.ranks[i], 0) for i in self.others if sent[i].numel()]


def bind_reduce_scatter(instruction: ReduceScatter, slots: Slots, members: Members) -> tuple[Bound, Finish]:
    """What starts the operation, leaving works and something to finish it with in the slot, and what finishes it."""
    into, own, count = instruction.into, members.own, len(members.ranks)
    taken = take(instruction, slots)

    def start() -> None:
        (flat,) = taken()
        parts = list(flat.chunk(count))
        received = [part if i == own else torch.empty_like(part) for i, part in enumerate(parts)]
        slots[into] = (members.exchange(parts, received), received)

    def finish(received: list[torch.Tensor]) -> Bundle:
        total = torch.add(received[0], received[1])  # a tensor of its own: the flat one is freed
        for part in received[2:]:
            total.add_(part)
        return (total,)

    def start_nccl() -> None:
        (flat,) = taken()
        parts = flat.chunk(count)
        total = torch.empty_like(parts[own])
        if members.ranks == sorted(members.ranks):
            work = dist.reduce_scatter_tensor(total, flat, group=members.group, async_op=True)
        else:
            work = dist.reduce_scatter(total, _by_rank(parts, members.ranks), group=members.group, async_op=True)
        slots[into] = ([work], (total, flat))

    if dist.get_backend(members.group) == "nccl":
        return start_nccl, lambda pair: pair[:1]
    return start, finish


def bind_all_gather(instruction: AllGather, slots: Slots, members: Members, kept: torch.Tensor) -> tuple[Bound, Finish]:
    """The same for a gather. `kept`: what this device keeps of the bucket: the whole flat tensor, or its shard."""
    into, own, count, bucket = instruction.into, members.own, len(members.ranks), instruction.bucket
    views = bucket.views(kept) if instruction.kept else None
    nccl = dist.get_backend(members.group) == "nccl"

    def start() -> None:
        if views is not None:
            flat = kept
        else:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=kept.device)
        parts = list(flat.chunk(count))
        shard = parts[own] if views is not None else kept
        if nccl:
            if members.ranks == sorted(members.ranks):
                works: list[Any] = [dist.all_gather_into_tensor(flat, shard, group=members.group, async_op=True)]
            else:
                works = [dist.all_gather(_by_rank(parts, members.ranks), shard, group=members.group, async_op=True)]
        else:
            works = members.exchange([shard] * count, parts)
            if views is None:
                parts[own].copy_(shard)
        slots[into] = (works, flat)

    def finish(flat: torch.Tensor) -> Bundle:
        return views if views is not None else bucket.views(flat)

    return start, finish


def bind_gather_alone(instruction: AllGather, slots: Slots, kept: torch.Tensor) -> Bound:
    """A gather over this device alone, which has all there is."""
    into, views = instruction.into, instruction.bucket.views(kept)

    def start() -> None:
        slots[into] = ([], views)

    return start


def _by_rank(parts: Any, ranks: list[int]) -> list[torch.Tensor]:
    """The members' parts in the order of their ranks."""
    return [part for _, part in sorted(zip(ranks, parts, strict=True), key=lambda pair: pair[0])]
