"""Collectives between processes: functions that start a collective, and functions that finish it when its
works are done.

gloo does not have a reduce-scatter (torch builds it from an all-reduce, with twice the bytes), and its
all-gather copies. Therefore with gloo each member sends its parts directly to the members that need them.
The receiver joins the parts in the order of the members, so the bits do not depend on which part came first.

NCCL has an operation for each kind of collective, and Piper uses it. Of gloo's operations, Piper uses only
the all-reduce, with two exceptions. For few bytes, gloo's rounds take longer than the transfer. If members
can read each other's memory, reading is faster than a transfer. In both cases each member gives its tensor to
all other members, and each member computes the sum locally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.ops.base import Bound, Bundle, Exchange, Slots, parts_of
from lightning_piper.runtime.messages import Messages, PendingWork
from lightning_piper.runtime.same_machine.shared_memory import (
    DIRECT,
    PIECE,
    DividedSum,
    SharedMessages,
    SharedSum,
)

# Returns the value of a collective. The argument is the second entry of the pair that the start of the
# collective left in the slot.
Finish = Callable[[Any], Bundle]
# Maximum bytes that a member sends in all, if each member sends its tensor to all other members, which then
# add. For more bytes, gloo's own all-reduce is faster.
FEW = 2**15

# torch 2.13 renamed these functions.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Members:
    """A communicator and its members, as one member sees them.

    Attributes:
        messages: The messages between the members.
        group: The communicator.
        ranks: The rank of each member in the communicator, in the order of the members.
        native: Whether the backend has an operation for each kind of collective. NCCL does, gloo does not.
        own: The position of this process among the members.
        wait_alike: Whether the members may wait for each other in the wait for a sum (`DividedSum`).
    """

    def __init__(self, messages: Messages, ranks: list[int], rank: int, native: bool) -> None:
        self.messages, self.group = messages, messages.group
        self.ranks, self.native, self.wait_alike = ranks, native, False
        self.own = ranks.index(rank)

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.ranks)) if i != self.own]

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[PendingWork]:
        """For each other member i, start to send `sent[i]` to it and to receive its tensor into
        `received[i]`.

        Empty tensors are not sent.
        """
        works = [
            self.messages.receive(received[i], self.ranks[i]) for i in self.others if received[i].numel()
        ]
        by_part: dict[int, tuple[torch.Tensor, list[int]]] = {}  # a tensor for several members is sent once
        for i in self.others:
            if sent[i].numel():
                by_part.setdefault(id(sent[i]), (sent[i], []))[1].append(self.ranks[i])
        for part, ranks in by_part.values():
            works += self.messages.send(part, ranks)
        return works

    def add_up(self, x: torch.Tensor) -> tuple[PendingWork, torch.Tensor]:
        """Start an all-reduce of `x`, which has the same shape on each member. All members get the same bits.

        Returns:
            The work, and the tensor that will hold the sum when the work is done. It may be `x` itself. Do not use `x`
            for anything else.
        """
        if x.is_complex():
            work, total = self.add_up(torch.view_as_real(x))
            return work, torch.view_as_complex(total)
        if isinstance(self.messages, SharedMessages) and x.nbytes > DIRECT and x.is_contiguous():
            kind = DividedSum if self.wait_alike and x.nbytes > PIECE else SharedSum
            shared = kind(self.messages, self.ranks, self.own, x)
            return shared, shared.total
        if x.nbytes * (len(self.ranks) - 1) > FEW or self.native:
            return self.group.allreduce([x]), x
        work = _Sum(self, x)
        return work, work.total

    def without_memory(self) -> Members:
        """Return the same members, with messages through the backend only and not through shared memory."""
        return Members(Messages(self.group), self.ranks, self.ranks[self.own], self.native)

    def by_rank(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the members' parts, ordered by the ranks of the members."""
        return [part for _, part in sorted(zip(self.ranks, parts, strict=True), key=lambda pair: pair[0])]

    @property
    def in_order(self) -> bool:
        """Whether the members are in the order of their ranks, as torch's flat collectives need."""
        return self.ranks == sorted(self.ranks)


class _Sum:
    """The work of an all-reduce of few bytes. It receives the whole tensor of each member, and adds the
    tensors in the members' order.

    Attributes:
        total: The tensor that holds the sum after `wait`: the tensor of the first member.
    """

    def __init__(self, members: Members, x: torch.Tensor) -> None:
        parts = [x if i == members.own else torch.empty_like(x) for i in range(len(members.ranks))]
        self.total, *self._others = parts
        self._works = members.exchange([x] * len(parts), parts)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for part in self._others:
            self.total.add_(part)


def bind_collective(
    exchange: Exchange, into: int, slots: Slots, members: Members
) -> tuple[Bound, Finish | None]:
    """Return the function that starts a collective, and the function that finishes it.

    The first function leaves a pair in the slot: the works, and the input of the second function. The second
    function is None if that input is the value itself.
    """
    if exchange.kind == "all_reduce":
        return _all_reduce(exchange, into, slots, members), None
    if members.native:
        if exchange.kind == "reduce_scatter":
            return _reduce_scatter(exchange, into, slots, members), lambda pair: pair[:1]
        if exchange.kind == "all_gather":
            return _all_gather(exchange, into, slots, members), lambda pending: exchange.join(*pending)
        # Keep the sent parts until the works are done, because another stream reads them.
        return _all_to_all(exchange, into, slots, members), lambda pending: exchange.join(
            pending[0], pending[1]
        )
    own = members.own

    def start() -> None:
        state = exchange.bring()
        parts = parts_of(exchange, state, len(members.ranks))
        received = exchange.room(state, parts)
        works = members.exchange(parts, received)
        if received[own] is not parts[own]:
            received[own].copy_(parts[own])
        slots[into] = (works, (state, received))

    return start, lambda pending: exchange.join(*pending)


def bind_single_member(exchange: Exchange, into: int, slots: Slots) -> Bound:
    """Return the function that runs a collective of a group with one member, which sends nothing."""

    def start() -> None:
        state = exchange.bring()
        slots[into] = ([], exchange.join(state, parts_of(exchange, state, 1)))

    return start


# Each of these functions returns the function that starts a collective, as `bind_collective` describes it. The
# last three use the operations of a native backend.


def _all_reduce(exchange: Exchange, into: int, slots: Slots, members: Members) -> Bound:
    def start() -> None:
        sums = [members.add_up(x) for x in exchange.bring()]
        slots[into] = ([work for work, _ in sums], tuple(total for _, total in sums))

    return start


def _reduce_scatter(exchange: Exchange, into: int, slots: Slots, members: Members) -> Bound:
    """Start a reduce-scatter. The slot also keeps the input, which another stream reads until the end."""

    def start() -> None:
        state = exchange.bring()
        flat, parts = state[0], parts_of(exchange, state, len(members.ranks))
        total = torch.empty_like(parts[members.own])
        if members.in_order:
            work = _reduce_scatter_flat(total, flat, group=members.group, async_op=True)
        else:
            work = dist.reduce_scatter(total, members.by_rank(parts), group=members.group, async_op=True)
        slots[into] = ([work], (total, flat))

    return start


def _all_gather(exchange: Exchange, into: int, slots: Slots, members: Members) -> Bound:
    """Start an all-gather. If the members are in order, the received parts lie in one flat tensor."""

    def start() -> None:
        state = exchange.bring()
        parts = parts_of(exchange, state, len(members.ranks))
        received = exchange.room(state, parts)
        if members.in_order:
            flat = received[0].as_strided((sum(part.numel() for part in received),), (1,))
            work = _all_gather_flat(flat, parts[members.own], group=members.group, async_op=True)
        else:
            work = dist.all_gather(
                members.by_rank(received), parts[members.own], group=members.group, async_op=True
            )
        slots[into] = ([work], (state, received))

    return start


def _all_to_all(exchange: Exchange, into: int, slots: Slots, members: Members) -> Bound:
    """Start an all-to-all. The slot also keeps the sent parts."""

    def start() -> None:
        state = exchange.bring()
        parts = parts_of(exchange, state, len(members.ranks))
        received = exchange.room(state, parts)
        work = dist.all_to_all(
            members.by_rank(received), members.by_rank(parts), group=members.group, async_op=True
        )
        slots[into] = ([work], (state, received, parts))

    return start
