"""Messages between processes of one machine through shared memory.

The sender writes the bytes into a part of its memory that other processes can read. A pipe carries a note
with the location of the bytes, or the message itself if the message has few bytes. Over the loopback device
each byte would be copied four times, by threads that take the cores from the step's computation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_piper.errors import ExecutionError
from lightning_piper.runtime.messages import Messages, PendingWork
from lightning_piper.runtime.same_machine.machine import machine
from lightning_piper.runtime.same_machine.pipes import MOST, Inbox, Outbox, bytes_of, pipes_for, writing_end
from lightning_piper.runtime.same_machine.shared_blocks import NAME, READERS, Note, shared_blocks

DIRECT = MOST  # maximum bytes of a message that the pipe itself carries
PIECE = 2**18  # Bytes to read before adding. So few bytes stay in a cache.
NOWHERE = [0, 0, 0, 0]  # the address of memory that other processes cannot read


class Incoming:
    """A message of more than `DIRECT` bytes that this process reads part by part.

    First call `arrive`. Then call `read` for each part, in order. At last call `done`.

    Args:
        work: The receipt of the note.
        note: The tensor that receives the note.
        file: The descriptor of the sender's memory.
        reader: The rank of this process, which selects its number in the head of the block.
    """

    def __init__(self, work: PendingWork, note: Note, file: int, reader: int) -> None:
        self._work, self._note, self._file, self._reader = work, note, file, reader
        self._at = 0

    def arrive(self) -> None:
        """Wait until the message has arrived."""
        self._work.wait()
        self._at = self._note[2]

    def read(self, into: torch.Tensor) -> torch.Tensor:
        """Fill a flat tensor with the next bytes of the message. Returns the tensor.

        Raises:
            ExecutionError: The sender's memory ends before the message does.
        """
        room = bytes_of(into)
        while room:
            count = os.preadv(self._file, [room], self._at)
            if not count:
                raise ExecutionError(
                    "a message between processes is incomplete, because its shared memory was truncated. "
                    "Check that the sending process still runs, and report this if it does [PIPER-X002]"
                )
            room, self._at = room[count:], self._at + count
        return into

    def skip(self, nbytes: int) -> None:
        """Skip the next bytes."""
        self._at += nbytes

    def replace(self, piece: torch.Tensor) -> None:
        """Write a flat tensor over the bytes that were read last, which the sender then has in its tensor."""
        left = bytes_of(piece)
        while left:
            left = left[os.pwrite(self._file, left, self._at - len(left)) :]

    def done(self) -> None:
        """Allow the sender to reuse its memory."""
        block, number, _ = self._note
        os.pwrite(self._file, array("q", (number,)), block + self._reader * self._note.itemsize)


class _Into:
    """The work of receiving a whole message."""

    def __init__(self, incoming: Incoming, into: torch.Tensor) -> None:
        self._incoming, self._into = incoming, into

    def wait(self) -> None:
        self._incoming.arrive()
        self._incoming.read(self._into.view(-1))
        self._incoming.done()


class SharedMessages(Messages):
    """Messages through shared memory and pipes.

    Args:
        group: A gloo communicator of processes on one machine.
        files: The opened memory file of each rank.
        inboxes, outboxes: The pipes from and to each other rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        files: Sequence[int],
        inboxes: Mapping[int, Inbox],
        outboxes: Mapping[int, Outbox],
    ) -> None:
        super().__init__(group)
        self._files, self._own = files, dist.get_rank(group)
        self._inboxes, self._outboxes = inboxes, outboxes

    def send(self, x: torch.Tensor, ranks: Sequence[int]) -> list[PendingWork]:
        if not ranks:
            return []
        message = bytes_of(x) if x.nbytes <= DIRECT else _bytes(shared_blocks().lay(x, ranks))
        return [work for rank in ranks for work in self._outboxes[rank].send_bytes(message)]

    def receive(self, into: torch.Tensor, rank: int) -> PendingWork:
        return (
            self._inboxes[rank].receive(into) if into.nbytes <= DIRECT else _Into(self.incoming(rank), into)
        )

    def close(self) -> None:
        super().close()
        for inbox, outbox in zip(self._inboxes.values(), self._outboxes.values(), strict=True):
            inbox.close()
            outbox.close()
        shared_blocks().give_back()

    def incoming(self, rank: int) -> Incoming:
        """Return the next message from this rank, of more than `DIRECT` bytes, to read in parts."""
        note = array("q", (0, 0, 0))
        work = self._inboxes[rank].receive_bytes(_bytes(note))
        return Incoming(work, note, self._files[rank], self._own)

    def any(self, flag: bool) -> bool:
        """Return whether a member passes True. Waits for all members. Collective."""
        rooms = [bytearray(1) for _ in self._inboxes]
        inboxes = zip(self._inboxes.values(), rooms, strict=True)
        works: list[PendingWork] = [inbox.receive_bytes(memoryview(room)) for inbox, room in inboxes]
        message = memoryview(bytes([flag]))
        works += [work for outbox in self._outboxes.values() for work in outbox.send_bytes(message)]
        for work in works:
            work.wait()
        return flag or any(room[0] for room in rooms)


def _bytes(note: Note) -> memoryview:
    return memoryview(note).cast("B")


def messages_of(group: dist.ProcessGroup, timeout: timedelta | None = None) -> Messages:
    """Return messages between the members of a gloo communicator. Collective.

    The messages go through shared memory and pipes if there are at most `READERS` members and all of them can
    open each other's memory and pipes. Otherwise gloo carries the messages.

    Args:
        group: The communicator.
        timeout: The time after which a missing message is an error (default: torch's).
    """
    size, own = dist.get_world_size(group), dist.get_rank(group)
    if size > READERS:
        return Messages(group)
    ranks = [rank for rank in range(size) if rank != own]
    pipes = pipes_for(ranks)
    ends = [pipes[rank][1] if rank in pipes else 0 for rank in range(size)]
    address = torch.tensor([*(_address() if len(pipes) == len(ranks) else NOWHERE), *ends])
    found = [torch.empty_like(address) for _ in range(size)]
    dist.all_gather(found, address, group=group)
    addresses = [each.tolist() for each in found]
    files = [_opened(*each[:4]) for each in addresses]
    # Only a process whose memory is open is known to be on this machine. The same process ID and descriptor may
    # also name a pipe of an unrelated process here.
    outer = {
        rank: None if files[rank] is None else writing_end(addresses[rank][1], addresses[rank][4 + own])
        for rank in ranks
    }
    all_open = torch.tensor(int(None not in files and None not in outer.values()))
    dist.all_reduce(all_open, dist.ReduceOp.MIN, group=group)
    for _, writing in pipes.values():
        os.close(writing)  # so that this process notices when the peer, the only other writer, is gone
    if not all_open:
        for file in (*(reading for reading, _ in pipes.values()), *outer.values()):
            if file is not None:
                os.close(file)
        return Messages(group)
    names = {rank: f"rank {dist.get_global_rank(group, rank)}" for rank in ranks}
    seconds = (timeout or default_pg_timeout).total_seconds()
    return SharedMessages(
        group,
        [file for file in files if file is not None],
        {rank: Inbox(pipes[rank][0], names[rank], seconds) for rank in ranks},
        {rank: Outbox(file, names[rank], seconds) for rank, file in outer.items() if file is not None},
    )


def _address() -> list[int]:
    """Return the address of this process's shared memory: machine, process, file descriptor, and the token at
    the start of the file. Return `NOWHERE` if other processes cannot read this memory.
    """
    # AttributeError, ImportError: not on Linux.
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import resource

        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return NOWHERE  # the limit on the size of files would also apply to this file
        return [_machine(), os.getpid(), shared_blocks().file, shared_blocks().token]
    return NOWHERE


def _machine() -> int:
    """Return a number that identifies the machine and its PID namespace."""
    names = f"{machine()} {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(hashlib.sha1(names.encode(), usedforsecurity=False).digest()[:7], "little")


@cache
def _opened(machine: int, process: int, file: int, token: int) -> int | None:
    """Return a file descriptor of another process's memory; None if this process cannot read the memory. The
    arguments are the entries of `_address` in the other process."""
    with contextlib.suppress(OSError):
        path = f"/proc/{process}/fd/{file}"
        if machine and machine == _machine() and NAME in os.readlink(path):
            opened = os.open(path, os.O_RDWR)
            if os.pread(opened, 8, 0) == token.to_bytes(8, "little"):
                return opened
            os.close(opened)
    return None


class SharedSum:
    """An all-reduce that adds the members' tensors in order, piece by piece as it reads them.

    Args:
        messages: The messages between the members.
        ranks: The ranks of the members, in the order in which their tensors are added.
        own: The position of this process among the members.
        x: A contiguous tensor of more than `DIRECT` bytes. Do not read it afterwards.

    Attributes:
        total: The tensor that holds the sum after `wait`. The tensor is `x`, unless the other members read
            `x` where it lies, in a shared block. Then it is a new tensor in another block.
    """

    def __init__(self, messages: SharedMessages, ranks: Sequence[int], own: int, x: torch.Tensor) -> None:
        self._others = [rank for i, rank in enumerate(ranks) if i != own]
        self._messages, self._own, self._count = messages, own, len(ranks)
        self._x, self.total = x.view(-1), self._room(x)
        self._incoming = {i: messages.incoming(rank) for i, rank in enumerate(ranks) if i != own}
        self._sent = messages.send(self._laid(x), self._others)

    def _room(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor for the sum."""
        blocks = shared_blocks()
        return blocks.empty(x.numel(), x.dtype).view(x.shape) if blocks.holds(x) else x

    def _laid(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the other members read."""
        return x

    def wait(self) -> None:
        """Wait for the terms of all ranks, and add them up piece by piece."""
        for incoming in self._incoming.values():
            incoming.arrive()
        self._add(self._x, self.total.view(-1))
        for incoming in self._incoming.values():
            incoming.done()
        for work in self._sent:
            work.wait()

    def _add(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Add the terms of all members to a range of the sum. `x` is this member's term."""
        numel = min(PIECE // x.element_size(), len(x))
        first = torch.empty(numel, dtype=x.dtype)
        other = torch.empty_like(first) if self._count > 2 else first  # of two terms, one is this member's
        for begin in range(0, len(x), numel):
            own, into = (x, total) if numel == len(x) else (y[begin : begin + numel] for y in (x, total))
            added = self._term(0, own, first)
            for i in range(1, self._count):
                out = into if i == self._count - 1 else first[: len(own)]
                added = torch.add(added, self._term(i, own, other), out=out)
            self._added(into)

    def _added(self, piece: torch.Tensor) -> None:
        """Called when a piece of the sum is complete."""

    def _term(self, member: int, own: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        if member == self._own:
            return own
        return self._incoming[member].read(room if len(room) == len(own) else room[: len(own)])


class DividedSum(SharedSum):
    """An all-reduce in which each member adds up one part of the tensors, and writes it into the tensors of the other
    members. So there is one tensor for the terms and the sum, and fewer bytes move.

    The bits are the bits of `SharedSum`. But `wait` also waits until all members wait. So all members must start
    their sums, and wait for them, in one order, and must not wait for anything else.
    """

    def _room(self, x: torch.Tensor) -> torch.Tensor:
        blocks = shared_blocks()
        if blocks.sends(x, self._others):
            return x
        return blocks.empty(x.numel(), x.dtype).view(x.shape).copy_(x)

    def _laid(self, x: torch.Tensor) -> torch.Tensor:
        return self.total

    def wait(self) -> None:
        """Wait for the terms of all ranks, add up this member's part, and wait for all other parts."""
        total = self.total.view(-1)
        begin, end = (len(total) * i // self._count for i in (self._own, self._own + 1))
        for incoming in self._incoming.values():
            incoming.arrive()
            incoming.skip(begin * total.element_size())
        self._add(total[begin:end], total[begin:end])
        for incoming in self._incoming.values():
            incoming.done()
        self._messages.any(False)  # all other parts are here
        for work in self._sent:
            work.wait()

    def _added(self, piece: torch.Tensor) -> None:
        for incoming in self._incoming.values():
            incoming.replace(piece)
