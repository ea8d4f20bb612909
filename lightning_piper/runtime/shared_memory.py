"""Messages between processes of one machine: the sender lays the bytes into memory of its own that others can read, and gloo
carries a note that says where. Over the loopback device each byte would be copied four times, and by threads that take the cores
from what the step computes.

The memory is an anonymous file. Each block of it begins with a number for each reader: of the last message that it has read there.
So the sender knows without being told when it can use a block again, and never waits for that: there are as many blocks as there
are messages under way at once. Messages of few bytes gloo carries itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_piper.errors import ExecutionError
from lightning_piper.runtime.messages import Messages, Work

DIRECT = 2**14  # bytes of a message that gloo carries itself
READERS = 8  # processes of a communicator, at most
PIECE = 2**18  # bytes that are read at once where they are added: they stay in a cache
_HEAD = 64  # bytes of a block before the message: READERS numbers
_NAME = "lightning_piper"


class _Block:
    """Room for one message. The note says where it begins, and which one it is."""

    def __init__(self, file: int, begin: int, size: int) -> None:
        self._memory = mmap.mmap(file, size, offset=begin)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[_HEAD:]
        self._read = memoryview(self._memory)[:_HEAD].cast("q")
        self._begin, self._number, self._readers = begin, 0, tuple[int, ...]()

    @property
    def free(self) -> bool:
        return all(self._read[reader] == self._number for reader in self._readers)

    def lay(self, x: torch.Tensor, readers: Sequence[int]) -> torch.Tensor:
        self.bytes[: x.nbytes].view(x.dtype).copy_(x.view(-1))
        self._number, self._readers = self._number + 1, tuple(readers)
        return torch.tensor([self._begin, self._number])

    def give_back(self) -> None:
        """Let the system have its pages, if it takes them; they are zeros when they are used again."""
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE)
            self._number, self._readers = 0, ()


class _Memory:
    """This process's memory for messages. Blocks are of sizes that are powers of two, and are used again, so it grows with what is
    under way at once, also where messages get longer and longer. Pages of a block that nothing was laid in are not there."""

    def __init__(self) -> None:
        self.file = os.memfd_create(_NAME)
        self.token = int.from_bytes(os.urandom(7), "little")
        os.pwrite(self.file, self.token.to_bytes(8, "little"), 0)
        self._end = mmap.PAGESIZE
        self._blocks: dict[int, list[_Block]] = {}  # by size

    def lay(self, x: torch.Tensor, readers: Sequence[int]) -> torch.Tensor:
        """Copy a contiguous tensor there, for these ranks. Returns the note of it.

        Raises:
            OutOfMemoryError: of torch.
        """
        size = max(mmap.PAGESIZE, 1 << (x.nbytes + _HEAD - 1).bit_length())
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.free), None)
        if block is None:
            blocks.append(block := self._new(size))
        return block.lay(x, readers)

    def give_back(self) -> None:
        """Give the pages back that messages lay in, but for those that are still to be read."""
        for blocks in self._blocks.values():
            for block in blocks:
                if block.free:
                    block.give_back()

    def _new(self, size: int) -> _Block:
        try:
            os.ftruncate(self.file, self._end + size)
            made = _Block(self.file, self._end, size)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no memory for a message of up to {size} bytes to another process ({error})") from error
        self._end += size
        return made


def _memory() -> _Memory:
    return _memory_of(os.getpid())


@cache
def _memory_of(process: int) -> _Memory:  # a process that is forked has one of its own
    return _Memory()


class Incoming:
    """A message that is under way. When it is there, its bytes are read from the first to the last; then it is done."""

    def __init__(self, work: Work, note: torch.Tensor, file: int, reader: int) -> None:
        self._work, self._note, self._file, self._reader = work, note, file, reader
        self._block = self._at = 0

    def arrive(self) -> None:
        """Wait until it is there."""
        self._work.wait()
        self._block = int(self._note[0])
        self._at = self._block + _HEAD

    def read(self, into: torch.Tensor) -> torch.Tensor:
        """Fill a flat tensor with the next of it. Returns the tensor."""
        room = into.view(torch.uint8).numpy().data
        while room:
            count = os.preadv(self._file, [room], self._at)
            if not count:
                raise ExecutionError("a message between processes ends before its end: the memory that it lies in was made smaller")
            room, self._at = room[count:], self._at + count
        return into

    def done(self) -> None:
        """The sender may use its memory again."""
        os.pwrite(self._file, self._note[1:].numpy().tobytes(), self._block + self._reader * self._note.itemsize)


class _Into:
    """The work of a message that is received whole."""

    def __init__(self, incoming: Incoming, into: torch.Tensor) -> None:
        self._incoming, self._into = incoming, into

    def wait(self) -> None:
        self._incoming.arrive()
        self._incoming.read(self._into.view(-1))
        self._incoming.done()


class SharedMessages(Messages):
    """Messages through memory.

    Args:
        group: over gloo, of processes of one machine.
        files: the memory of each rank, opened here.
    """

    def __init__(self, group: dist.ProcessGroup, files: Sequence[int]) -> None:
        super().__init__(group)
        self._files, self._own = files, dist.get_rank(group)

    def send(self, x: torch.Tensor, ranks: Sequence[int]) -> list[Work]:
        return super().send(x if x.nbytes <= DIRECT or not ranks else _memory().lay(x, ranks), ranks)

    def receive(self, into: torch.Tensor, rank: int) -> Work:
        return super().receive(into, rank) if into.nbytes <= DIRECT else _Into(self.incoming(rank), into)

    def close(self) -> None:
        super().close()
        _memory().give_back()

    def incoming(self, rank: int) -> Incoming:
        """What this rank sends, more than `DIRECT` bytes, to be read piece by piece."""
        note = torch.zeros(2, dtype=torch.int64)
        return Incoming(super().receive(note, rank), note, self._files[rank], self._own)


def messages_of(group: dist.ProcessGroup) -> Messages:
    """Messages between the members of a communicator over gloo: through memory, if all can read each other's. Collective."""
    size = dist.get_world_size(group)
    if size > READERS:
        return Messages(group)
    own, found = torch.tensor(_address()), [torch.empty(4, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    files = [_opened(*address) for address in map(tuple, map(torch.Tensor.tolist, found))]
    all_open = torch.tensor(int(None not in files))
    dist.all_reduce(all_open, dist.ReduceOp.MIN, group=group)
    return SharedMessages(group, [file for file in files if file is not None]) if all_open else Messages(group)


def _address() -> list[int]:
    """Where other processes find this one's memory: on which machine, in which process and file, and what it begins with."""
    with contextlib.suppress(OSError, AttributeError, ImportError):  # the last two: not on Linux
        import resource

        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return [0, 0, 0, 0]  # this file would be limited, too
        return [_machine(), os.getpid(), _memory().file, _memory().token]
    return [0, 0, 0, 0]


def _machine() -> int:
    """A number of the machine, and of the numbering of processes on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    names = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(hashlib.sha1(names.encode(), usedforsecurity=False).digest()[:7], "little")


@cache
def _opened(machine: int, process: int, file: int, token: int) -> int | None:
    """Another process's memory, if this one can read it."""
    with contextlib.suppress(OSError):
        path = f"/proc/{process}/fd/{file}"
        if machine and machine == _machine() and _NAME in os.readlink(path):
            opened = os.open(path, os.O_RDWR)
            if os.pread(opened, 8, 0) == token.to_bytes(8, "little"):
                return opened
            os.close(opened)
    return None


class SharedSum:
    """The sum of what the members hold, added in their order, piece by piece as it is read.

    Args:
        messages: between them.
        ranks: of the members, in their order.
        own: position of this process.
        x: contiguous, of more than `DIRECT` bytes; the sum is put there.
    """

    def __init__(self, messages: SharedMessages, ranks: Sequence[int], own: int, x: torch.Tensor) -> None:
        self._x, self._own, self._last = x.view(-1), own, len(ranks) - 1
        self._incoming = {i: messages.incoming(rank) for i, rank in enumerate(ranks) if i != own}
        self._sent = messages.send(x, [rank for i, rank in enumerate(ranks) if i != own])

    def wait(self) -> None:
        for incoming in self._incoming.values():
            incoming.arrive()
        numel = PIECE // self._x.element_size()
        first, other = (torch.empty(min(numel, len(self._x)), dtype=self._x.dtype) for _ in range(2))
        for own in self._x.split(numel):
            total = self._term(0, own, first)
            for i in range(1, self._last + 1):
                torch.add(total, self._term(i, own, other), out=own if i == self._last else total)
        for incoming in self._incoming.values():
            incoming.done()
        for work in self._sent:
            work.wait()

    def _term(self, member: int, own: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return own if member == self._own else self._incoming[member].read(room[: len(own)])
