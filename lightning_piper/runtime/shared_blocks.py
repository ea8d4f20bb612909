"""Memory of this process that others of the machine can read: blocks of an anonymous file.

Each block begins with a number for each reader: of the last message that it has read there. So the sender knows without being told
when it can use a block again, and never waits for that: there are as many blocks as there are messages under way at once.

A tensor may be made in a block: what is sent from there is not copied. The block is used again when no tensor lies in it any more
and all have read it. So memory that a step takes and gives back is there for the next one, and the system has no pages to clear.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_piper.runtime.forks import in_forks
from lightning_piper.runtime.mapped import Mapped

READERS = 8  # processes of a communicator, at most
HEAD = 64  # bytes of a block before the message: READERS numbers
NOTE = 3  # numbers of a note: where its block begins, which one it is of those that lay there, and where it begins
NAME = "lightning_piper"


class _Block:
    """Room for one message, or for one tensor, parts of which are messages."""

    def __init__(self, file: int, begin: int, size: int) -> None:
        self._memory = Mapped(file, begin, size)
        self._bytes = torch.frombuffer(self._memory.room, dtype=torch.uint8, offset=HEAD)
        self._read = memoryview(self._memory.room).cast("B")[:HEAD].cast("q")
        self._begin, self._number, self._readers = begin, 0, set[int]()
        self._lent: StorageWeakRef | None = None

    @property
    def address(self) -> int:
        """Of what lies in it."""
        return self._bytes.data_ptr()

    @property
    def lent(self) -> bool:
        return self._lent is not None and not self._lent.expired()

    @property
    def free(self) -> bool:
        return not self.lent and all(self._read[reader] == self._number for reader in self._readers)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._next()
        made = torch.frombuffer(self._memory.room, dtype=dtype, count=numel, offset=HEAD)
        self._lent = StorageWeakRef(made.untyped_storage())
        return made

    def lay(self, x: torch.Tensor, readers: Collection[int]) -> torch.Tensor:
        self._next()
        self._bytes[: x.nbytes].view(x.dtype).copy_(x.view(-1))
        return self.note(0, readers)

    def sends(self, readers: Collection[int]) -> bool:
        """Can these ranks be sent something that lies here? A reader's number says that it has read one message."""
        return self._readers.isdisjoint(readers)

    def note(self, at: int, readers: Collection[int]) -> torch.Tensor:
        self._readers.update(readers)
        return torch.tensor([self._begin, self._number, self._begin + HEAD + at])

    def give_back(self) -> None:
        """Let the system have its pages, if it takes them; they are zeros when they are used again."""
        with contextlib.suppress(OSError):
            self._memory.remove()
            self._number, self._readers = 0, set()

    def part(self) -> None:
        """In a forked process: what it writes to a tensor that lies here is its own, as it would be in other memory."""
        if self.lent:
            self._memory.part()

    def _next(self) -> None:
        self._number, self._readers, self._lent = self._number + 1, set(), None


class SharedBlocks:
    """Blocks are of sizes that are powers of two, and are used again, so the memory grows with what is under way at once, also
    where messages get longer and longer. Pages of a block that nothing was laid in are not there."""

    def __init__(self) -> None:
        self.file = os.memfd_create(NAME)
        self.token = int.from_bytes(os.urandom(7), "little")
        os.pwrite(self.file, self.token.to_bytes(8, "little"), 0)
        self._end = mmap.PAGESIZE
        self._blocks: dict[int, list[_Block]] = {}  # by size
        self._at: dict[int, _Block] = {}  # by address
        in_forks(self, SharedBlocks._part)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor without content.

        Raises:
            OutOfMemoryError: of torch.
        """
        return self._free(numel * dtype.itemsize).lend(numel, dtype)

    def holds(self, x: torch.Tensor) -> bool:
        """Does it lie here?"""
        return x.untyped_storage().data_ptr() in self._at

    def lay(self, x: torch.Tensor, readers: Collection[int]) -> torch.Tensor:
        """Copy a contiguous tensor here, for these ranks, unless it lies here: then it is not to be changed any more. Returns the
        note of it.

        Raises:
            OutOfMemoryError: of torch.
        """
        block = self._at.get(x.untyped_storage().data_ptr())
        if block is not None and block.sends(readers):
            return block.note(int(x.storage_offset()) * x.itemsize, readers)
        return self._free(x.nbytes).lay(x, readers)

    def give_back(self) -> None:
        """Give the pages back that messages lay in, but for those that are still to be read."""
        for blocks in self._blocks.values():
            for block in blocks:
                if block.free:
                    block.give_back()

    def _part(self) -> None:
        for block in self._at.values():
            block.part()

    def _free(self, nbytes: int) -> _Block:
        """A block that can be used, of this many bytes or more."""
        size = max(mmap.PAGESIZE, 1 << (nbytes + HEAD - 1).bit_length())
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.free), None)
        if block is None:
            blocks.append(block := self._new(size, nbytes))
            self._at[block.address] = block
        return block

    def _new(self, size: int, nbytes: int) -> _Block:
        try:
            os.ftruncate(self.file, self._end + size)
            made = _Block(self.file, self._end, size)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no memory for a message of {nbytes} bytes to another process ({error})") from error
        self._end += size
        return made


def shared_blocks() -> SharedBlocks:
    """This process's."""
    return _of(os.getpid())


@cache
def _of(process: int) -> SharedBlocks:  # a process that is forked has its own
    return SharedBlocks()
