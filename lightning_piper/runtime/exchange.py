"""Tokens on their way to experts and back: how rows are cut for the members of a group, and put together where they arrive.

At home, rows are sorted by expert, and experts by their owner: what one member gets is one run of rows. At the owner of n experts,
rows are sorted by expert, and for each by the member that they come from: the order of one device that has all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.plan.instructions import AllToAll
from lightning_piper.runtime.collectives import Finish, Members
from lightning_piper.runtime.transport import Bound, Bundle, Slots


@dataclass(frozen=True)
class Sizes:
    """How many rows travel.

    Attributes:
        home: `[member][expert]`, rows that this device has for each expert of each member.
        arrived: `[member][expert]`, rows that each member has for each expert of this device.
    """

    home: Sequence[Sequence[int]]
    arrived: Sequence[Sequence[int]]


class Exchange:
    """One exchange of one device; the way, and whether all parts are even, are decided when it is made.

    Args:
        instruction: what is exchanged.
        sizes: by the slot of the counts that arrived; filled by their exchange, read by those of rows.
    """

    def __init__(self, instruction: AllToAll, sizes: dict[int, Sizes]) -> None:
        self._way, self._even, self._members = instruction.way, instruction.even, len(instruction.members)
        self._counts = instruction.into if instruction.way == "counts" else instruction.reads[-1].slot
        self._reads, self._sizes = instruction.reads, sizes

    def take(self, slots: Slots) -> torch.Tensor:
        """What this device brings; empties the slots that are read for the last time."""
        (x,) = slots[self._reads[0].slot]
        for read in self._reads:
            if read.last:
                slots[read.slot] = None
        return x

    def cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What goes to each member."""
        if self._way == "counts":
            return list(x.view(self._members, -1))
        if self._even:
            return [part.contiguous() for part in x.chunk(self._members, 0 if self._way == "dispatch" else 1)]
        sizes = self._sizes[self._counts]
        runs = sizes.home if self._way == "dispatch" else sizes.arrived
        total = sum(map(sum, runs))
        if total != x.shape[0]:
            raise ValueError(f"the counts add up to {total}, and there are {x.shape[0]} rows; give one count for each expert")
        if self._way == "dispatch":
            return list(x.contiguous().split([sum(run) for run in runs]))
        parts = x.split([n for of_expert in zip(*runs, strict=True) for n in of_expert])
        return [torch.cat(parts[i :: self._members]) for i in range(self._members)]

    def room(self, x: torch.Tensor, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where what comes from each member is received. `x`, `sent`: what this one brings and sends."""
        if self._way == "counts" or self._even:
            return [torch.empty_like(part) for part in sent]
        sizes = self._sizes[self._counts]
        runs = [sum(run) for run in (sizes.arrived if self._way == "dispatch" else sizes.home)]
        return list(x.new_empty(sum(runs), *x.shape[1:]).split(runs))

    def join(self, parts: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What the members sent, put together. `x`: what this one brought."""
        if self._way == "counts":
            arrived = torch.stack(list(parts))
            self._sizes[self._counts] = Sizes(x.view(self._members, -1).tolist(), arrived.tolist())
            return arrived
        if self._even:
            return torch.cat(list(parts), 1 if self._way == "dispatch" else 0)
        if self._way == "combine":
            return torch.cat(list(parts))
        arrived_sizes = self._sizes[self._counts].arrived
        runs = [part.split(list(sizes)) for part, sizes in zip(parts, arrived_sizes, strict=True)]
        return torch.cat([run for of_expert in zip(*runs, strict=True) for run in of_expert])


def bind_all_to_all(instruction: AllToAll, slots: Slots, members: Members, sizes: dict[int, Sizes]) -> tuple[Bound, Finish]:
    """What starts an exchange between processes, leaving works and what they fill in the slot, and what finishes it."""
    into, own, exchange = instruction.into, members.own, Exchange(instruction, sizes)
    nccl = dist.get_backend(members.group) == "nccl"

    def start() -> None:
        x = exchange.take(slots)
        sent = exchange.cut(x)
        received = exchange.room(x, sent)
        if nccl:
            order = sorted(range(len(sent)), key=members.ranks.__getitem__)
            works: list[Any] = [
                dist.all_to_all([received[i] for i in order], [sent[i] for i in order], group=members.group, async_op=True)
            ]
        else:
            works = members.exchange(sent, received)
            received[own].copy_(sent[own])
        slots[into] = (works, (x, sent, received))

    def finish(pending: tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]) -> Bundle:
        x, _, received = pending
        return (exchange.join(received, x),)

    return start, finish
