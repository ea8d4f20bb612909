"""Communicators of a simulated accelerator, as in NCCL: each one has its own stream on every member.

An operation begins after the work that the member has issued to its current stream. It occupies the
communicator's stream on each member until all members have reached it, and later work on that stream waits. A
receive occupies the stream until its send is matched, and a send until its receive is matched. `Issued.wait`
makes the current stream wait, never the host. Tensors in transit are kept alive until the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lightning_piper.accelerators.conflicts import Note, accesses_of
from lightning_piper.accelerators.memory import StorageBlock
from lightning_piper.accelerators.queues import Moment, Queue, QueuedWork
from lightning_piper.accelerators.simulated_device import Simulated, Stream

Tensors = Sequence[torch.Tensor]
# A function that runs an operation of all members. Its argument has a pair for each member: the tensors that
# the member sends, and the tensors for its results.
Exchange = Callable[[list[tuple[list[torch.Tensor], list[torch.Tensor]]]], None]


@dataclass
class Meeting:
    """An operation of several members.

    Attributes:
        count: Number of members.
        works: Position of a member -> its queue, and its work in this queue.
        brought: Position of a member -> the tensors that it sends, and the tensors for its results. These
            tensors come from `Simulated.of_work`.
        touched: Blocks of memory that the operation uses.
        notes: The notes of all members' work.
        done: Whether the operation has run.
    """

    count: int
    works: dict[int, tuple[Queue, QueuedWork]] = field(default_factory=dict)
    brought: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    touched: list[StorageBlock] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    done: bool = False

    @property
    def complete(self) -> bool:
        """Whether the operation can run, because it is the next work of all members, or has run."""
        return self.done or (
            len(self.works) == self.count and all(q.work[0] is work for q, work in self.works.values())
        )


class Communicator:
    """A communicator, with the state that its members share.

    Args:
        name: Name for messages.
        count: Number of members.
        order: Positions of members, in the order in which a sum adds their terms.

    Attributes:
        meetings: (key of `Member._meet`, number of the operation with this key) -> the operation.
    """

    def __init__(self, name: str, count: int, order: Sequence[int]) -> None:
        self.name, self.count, self.order = name, count, order
        self.meetings: dict[object, Meeting] = {}

    def meeting(self, key: object, count: int) -> Meeting:
        return self.meetings.setdefault(key, Meeting(count))


class Issued:
    """A handle of one operation for one member, like `torch.distributed.Work`. It keeps the operation's
    tensors alive until `wait`."""

    def __init__(self, simulated: Simulated, end: Moment, kept: object) -> None:
        self._simulated, self._end, self._kept = simulated, end, kept

    def wait(self, timeout: object = None) -> bool:
        self._simulated.host.current.queue.wait(self._end)
        self._kept = None
        return True


class Member:
    """A member's side of a communicator. It has the methods of a `torch.distributed` process group that
    `runtime.collectives` and `runtime.messages` call."""

    def __init__(self, simulated: Simulated, communicator: Communicator, rank: int, stream: Stream) -> None:
        self._simulated, self._communicator, self._rank, self._stream = simulated, communicator, rank, stream
        self._number: Counter[object] = Counter()  # key of `_meet` -> number of operations issued so far

    def send(self, tensors: Tensors, peer: int, tag: int) -> Issued:
        return self._meet("send", (self._rank, peer), 0, 2, list(tensors), [], _message)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Issued:
        return self._meet("recv", (peer, self._rank), 1, 2, [], list(tensors), _message)

    def allreduce(self, tensors: Tensors, opts: object = None) -> Issued:
        return self._all(list(tensors), list(tensors), self._sum)

    def reduce_scatter_single(self, into: torch.Tensor, flat: torch.Tensor, opts: object = None) -> Issued:
        return self._all(list(flat.chunk(self._communicator.count)), [into], self._scatter)

    def reduce_scatter(self, into: Tensors, parts: Sequence[Tensors], opts: object = None) -> Issued:
        return self._all(list(parts[0]), list(into), self._scatter)

    def all_gather_single(self, into: torch.Tensor, part: torch.Tensor, opts: object = None) -> Issued:
        return self._all([part], list(into.chunk(self._communicator.count)), _gather)

    def allgather(self, into: Sequence[Tensors], part: Tensors, opts: object = None) -> Issued:
        return self._all(list(part), list(into[0]), _gather)

    def alltoall(self, into: Tensors, parts: Tensors, opts: object = None) -> Issued:
        return self._all(list(parts), list(into), _transpose)

    # The names of these functions before torch 2.13.
    _reduce_scatter_base, _allgather_base = (reduce_scatter_single, all_gather_single)

    def _all(self, given: list[torch.Tensor], into: list[torch.Tensor], exchange: Exchange) -> Issued:
        return self._meet("collective", "all", self._rank, self._communicator.count, given, into, exchange)

    def _meet(
        self,
        what: str,
        key: object,
        position: int,
        count: int,
        given: list[torch.Tensor],
        into: list[torch.Tensor],
        exchange: Exchange,
    ) -> Issued:
        """Issue one member's part of an operation. `exchange` runs once, when all members have reached it.

        Args:
            what: Name of the operation in messages.
            key: The n-th operation with this key of one member belongs to the n-th of the other members.
            position: Position of this member among the `count` members of the operation.
            given: The tensors that this member sends.
            into: The tensors for this member's results.
        """
        simulated, queue = self._simulated, self._stream.queue
        # The operation begins after the work that this member has issued to its current stream.
        queue.wait(simulated.host.current.queue.now)
        self._number[key] += 1
        meeting = self._communicator.meeting((key, self._number[key]), count)
        touched = meeting.touched
        meeting.brought[position] = tuple([simulated.of_work(x, touched) for x in xs] for xs in (given, into))  # type: ignore[assignment]
        where = f"{what} of {self._communicator.name} on {queue.name}"
        comes_to = [*((x, False) for x in given), *((x, True) for x in into)]
        meeting.notes.append(
            simulated.note(f"{what} of {self._communicator.name}", queue, accesses_of(comes_to))
        )

        # The first member whose queue reaches the complete operation runs it for all.
        def run() -> None:
            if not meeting.done:
                meeting.done = True
                for i, note in enumerate(meeting.notes):
                    simulated.check(note, [] if i else meeting.touched)
                exchange([meeting.brought[i] for i in range(count)])

        work = QueuedWork(where, run, ready=lambda: meeting.complete)
        meeting.works[position] = queue, work
        return Issued(simulated, queue.issue(work), (given, into))

    def _sum(self, brought: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Run an all-reduce. `brought` is as for `Exchange`."""
        for x, *terms in zip(*(into for _, into in brought), strict=True):
            total = self._added([x, *terms])
            for target in (x, *terms):
                target.copy_(total)

    def _scatter(self, brought: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Run a reduce-scatter. `brought` is as for `Exchange`."""
        totals = [self._added([given[i] for given, _ in brought]) for i in range(len(brought))]
        for (_, (target,)), total in zip(brought, totals, strict=True):
            target.copy_(total)

    def _added(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the terms, added in the communicator's order. `terms` has one for each member."""
        first, *rest = (terms[rank] for rank in self._communicator.order)
        total = first.clone()
        for x in rest:
            total.add_(x)
        return total


def _message(brought: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
    """Run a send and its receive. `brought` is as for `Exchange`, with the sender first."""
    (given, _), (_, into) = brought
    for x, target in zip(given, into, strict=True):
        target.copy_(x)


def _gather(brought: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
    """Run an all-gather. `brought` is as for `Exchange`."""
    parts = [given[0].clone() for given, _ in brought]
    for _, into in brought:
        for target, part in zip(into, parts, strict=True):
            target.copy_(part)


def _transpose(brought: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
    """Run an all-to-all: part i of each member goes to member i. `brought` is as for `Exchange`."""
    for i, (_, into) in enumerate(brought):
        for target, (given, _) in zip(into, brought, strict=True):
            target.copy_(given[i])
