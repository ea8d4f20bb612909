"""Memory of this process that other processes on the machine can read: blocks of an anonymous file.

The head of each block has a number for each reader: the number of the last message that the reader has read
in this block. So the sender can see when it may reuse a block, without a message. The sender never waits for
a reader, because there are as many blocks as messages under way at once.

A tensor may be allocated in a block, from which it can be sent without a copy. A block is reused when all its
tensors are gone and all readers have read it. So a step reuses the memory of the step before, and
the kernel does not have to clear pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections.abc import Collection
from functools import cache
from typing import TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_piper.runtime.same_machine.forks import in_forks
from lightning_piper.runtime.same_machine.mapped_memory import Mapped

READERS = 8  # maximum processes of a communicator
HEAD = 64  # bytes of a block before the message: READERS numbers
# offset of the block in the file, number of the message in the block, offset of the data
Note: TypeAlias = "array[int]"
NAME = "lightning_piper"


class _SharedBlock:
    """The memory for one message, or for one tensor whose parts are messages."""

    def __init__(self, file: int, begin: int, size: int) -> None:
        self._memory = Mapped(file, begin, size)
        self._bytes = torch.frombuffer(self._memory.room, dtype=torch.uint8, offset=HEAD)
        # For each rank, the number of the last message that this reader has read.
        self._read = memoryview(self._memory.room).cast("B")[:HEAD].cast("q")
        self._begin, self._number, self._readers = begin, 0, set[int]()
        self._lent: StorageWeakRef | None = None  # the storage of the tensor that lies in the block

    @property
    def address(self) -> int:
        """The address of the data."""
        return self._bytes.data_ptr()

    @property
    def lent(self) -> bool:
        """Whether a tensor lies in the block."""
        return self._lent is not None and not self._lent.expired()

    @property
    def free(self) -> bool:
        """Whether no tensor lies in the block, and all readers have read its message."""
        return not self.lent and all(self._read[reader] == self._number for reader in self._readers)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat tensor in this block, which is not free as long as the tensor lives."""
        self._next()
        made = torch.frombuffer(self._memory.room, dtype=dtype, count=numel, offset=HEAD)
        self._lent = StorageWeakRef(made.untyped_storage())
        return made

    def lay(self, x: torch.Tensor, readers: Collection[int]) -> Note:
        """Copy a contiguous tensor into this block as a message, and return the message's note."""
        self._next()
        self._bytes[: x.nbytes].view(x.dtype).copy_(x.view(-1))
        return self.note(0, readers)

    def sends(self, readers: Collection[int]) -> bool:
        """Return whether a message from this block can be sent to these ranks. A reader's number can mark
        only one message."""
        return self._readers.isdisjoint(readers)

    def note(self, at: int, readers: Collection[int]) -> Note:
        """Return the note of a message that begins `at` bytes after the head. The block is not free again
        until these readers have read the message."""
        self._readers.update(readers)
        return array("q", (self._begin, self._number, self._begin + HEAD + at))

    def give_back(self) -> None:
        """Return the pages to the kernel, if the system supports this. Then the block reads as zeros."""
        with contextlib.suppress(OSError):
            self._memory.remove()
            self._number, self._readers = 0, set()

    def make_private(self) -> None:
        """If a tensor lies in the block, make this process's writes to it private. Called in a forked
        process, whose writes would otherwise reach the memory of the process that it was forked from."""
        if self.lent:
            self._memory.make_private()

    def _next(self) -> None:
        self._number, self._readers, self._lent = self._number + 1, set(), None


class SharedBlocks:
    """A pool of blocks whose sizes are powers of two.

    Blocks are reused, so the memory grows with the messages that are under way at once, even if messages get
    longer over time. Pages that were never written take no memory.

    Attributes:
        file: The descriptor of the anonymous file that has the blocks.
        token: A random number at the file's beginning, by which other processes recognize the file.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create(NAME)
        self.token = int.from_bytes(os.urandom(7), "little")
        os.pwrite(self.file, self.token.to_bytes(8, "little"), 0)
        self._end = mmap.PAGESIZE
        self._blocks: dict[int, list[_SharedBlock]] = {}  # size in bytes -> the blocks of this size
        self._at: dict[int, _SharedBlock] = {}  # address of the data -> block
        in_forks(self, SharedBlocks._make_private)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat tensor without initializing it.

        Raises:
            torch.OutOfMemoryError: The system has no memory for it.
        """
        return self._free(numel * dtype.itemsize).lend(numel, dtype)

    def holds(self, x: torch.Tensor) -> bool:
        """Return whether a tensor lies in a block."""
        return x.untyped_storage().data_ptr() in self._at

    def sends(self, x: torch.Tensor, readers: Collection[int]) -> bool:
        """Return whether `lay` makes the tensor itself the message for these ranks."""
        block = self._at.get(x.untyped_storage().data_ptr())
        return block is not None and block.sends(readers)

    def lay(self, x: torch.Tensor, readers: Collection[int]) -> Note:
        """Make a contiguous tensor a message for these ranks to read, and return the note of the message.

        If the tensor lies in a block, the message is the tensor itself, so do not change the tensor afterwards.
        The tensor is copied into another block in two cases: it does not lie in a block, or one of the
        readers already reads a message in the tensor's block.

        Raises:
            torch.OutOfMemoryError: The system has no memory for it.
        """
        block = self._at.get(x.untyped_storage().data_ptr())
        if block is not None and block.sends(readers):
            return block.note(int(x.storage_offset()) * x.itemsize, readers)
        return self._free(x.nbytes).lay(x, readers)

    def give_back(self) -> None:
        """Return the pages of all free blocks to the kernel. Blocks that are still to be read keep their
        pages."""
        for blocks in self._blocks.values():
            for block in blocks:
                if block.free:
                    block.give_back()

    def _make_private(self) -> None:
        for block in self._at.values():
            block.make_private()

    def _free(self, nbytes: int) -> _SharedBlock:
        """Return a free block of at least this many bytes."""
        size = max(mmap.PAGESIZE, 1 << (nbytes + HEAD - 1).bit_length())
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.free), None)
        if block is None:
            blocks.append(block := self._new(size, nbytes))
            self._at[block.address] = block
        return block

    def _new(self, size: int, nbytes: int) -> _SharedBlock:
        """Extend the file by a new block.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """
        try:
            os.ftruncate(self.file, self._end + size)
            made = _SharedBlock(self.file, self._end, size)
        except OSError as error:
            raise torch.OutOfMemoryError(
                f"this process cannot get shared memory for a message of {nbytes} bytes ({error}). Free memory of "
                "this machine, or raise the limits of the process (ulimit -v, ulimit -f) [PIPER-X002]"
            ) from error
        self._end += size
        return made


def shared_blocks() -> SharedBlocks:
    """Return the blocks of this process."""
    return _of(os.getpid())


@cache
def _of(process: int) -> SharedBlocks:  # by process, because a forked process needs its own
    return SharedBlocks()
