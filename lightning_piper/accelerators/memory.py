"""Memory of a simulated accelerator, with the rules of a caching allocator.

Memory belongs to the stream on which it was allocated. When the program no longer refers to the memory, it
returns to that stream immediately. The stream's next tensor may reuse the memory, even if another stream has
not read it yet, unless `record_stream` has recorded the other stream. As soon as the memory may be reused,
the simulation overwrites it with `POISON`: NaN, -1, or the largest unsigned integer. New memory is also
filled with `POISON`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from lightning_piper.accelerators.queues import Moment, Queue, QueuedWork, Scheduler

POISON = 0xFF  # value of every byte: NaN in every floating point type, -1, 255, True
ALIGNED = 64  # bytes, as torch aligns host memory; kernels, and so the bits of results, depend on it


class TensorLayout(NamedTuple):
    """A layout of a tensor to be made: `offset` in elements, `nbytes` of its whole storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorLayout:
        return cls(tuple(x.shape), x.stride(), x.dtype, int(x.storage_offset()), x.untyped_storage().nbytes())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class StorageBlock:
    """A block of memory: one storage.

    Attributes:
        storage: The storage through which the device's work uses the memory. The program has another storage
            for the same memory, which it may release earlier.
        owner: The queue of the stream that allocated the memory.
        made: Name of the operation that allocated the memory.
        gone: Whether the memory is overwritten, because a later tensor may reuse it.
        uses: Queues of other streams that `record_stream` has recorded.
    """

    __slots__ = ("gone", "made", "owner", "storage", "uses")

    def __init__(self, storage: torch.UntypedStorage, owner: Queue, made: str) -> None:
        self.storage, self.owner, self.made = storage, owner, made
        self.gone, self.uses = False, set[Queue]()

    def overwrite(self) -> None:
        self.gone = True
        ctypes.memset(self.storage.data_ptr(), POISON, self.storage.nbytes())


class Memory:
    """A table of the blocks that a program refers to, by the address of their storage.

    Attributes:
        held: Number of bytes that no allocation may reuse, because the program refers to them. Also bytes
            that the program has released, if a recorded stream was not done at the last allocation.
        most: The peak of `held`.
        closed: Whether the simulation is over, so that released memory no longer matters.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._blocks: dict[int, StorageBlock] = {}
        self._awaited: list[tuple[list[Moment], int]] = []  # (moments that must pass first, released bytes)
        self.held = self.most = 0
        self.closed = False

    def new(self, spec: TensorLayout, owner: Queue, made: str) -> tuple[torch.Tensor, StorageBlock | None]:
        """Return a new tensor for the program, and its block (None if the tensor is empty).

        Args:
            spec: Layout of the tensor.
            owner: Queue of the current stream.
            made: Name of the operation that makes the tensor.
        """
        while owner.returned:
            owner.returned.pop()()
        if not spec.nbytes:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype), None
        self._take(spec.nbytes)
        room = bytearray(spec.nbytes + ALIGNED)
        first = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % ALIGNED
        # Both share the memory. `of_program` ends when the program no longer refers to the tensor's storage.
        of_program, of_work = ((ctypes.c_char * spec.nbytes).from_buffer(room, first) for _ in range(2))
        ctypes.memset(of_work, POISON, spec.nbytes)
        block = StorageBlock(torch.frombuffer(of_work, dtype=torch.uint8).untyped_storage(), owner, made)
        address = block.storage.data_ptr()
        self._blocks[address] = block
        weakref.finalize(of_program, self._released, address, block).atexit = False
        return spec.on(torch.frombuffer(of_program, dtype=torch.uint8).untyped_storage()), block

    def _take(self, nbytes: int) -> None:
        awaited, self._awaited = self._awaited, []
        for moments, returned in awaited:
            self._let_go(moments, returned)
        self.held += nbytes
        self.most = max(self.most, self.held)

    def _let_go(self, moments: list[Moment], nbytes: int) -> None:
        if all(moment.past for moment in moments):
            self.held -= nbytes
        else:
            self._awaited.append((moments, nbytes))

    def of(self, x: torch.Tensor) -> StorageBlock | None:
        """Return the block of a tensor; None if this table does not have it."""
        return self._blocks.get(x.untyped_storage().data_ptr())

    def _released(self, address: int, block: StorageBlock) -> None:
        """Return memory to its stream, because the program no longer refers to it."""
        if self.closed:
            return
        self._blocks.pop(address, None)
        used = [queue.now for queue in block.uses]
        self._let_go(used, block.storage.nbytes())
        block.owner.returned.append(self._giving_back(block, used))

    def _giving_back(self, block: StorageBlock, used: list[Moment]) -> Callable[[], None]:
        """Return a function that schedules the overwriting of a released block: after the work that its owner
        has by then, and after the moments `used` of recorded streams."""

        def give_back() -> None:
            if used:
                self._scheduler.later.append(([block.owner.now, *used], block.overwrite))
            else:
                block.owner.issue(QueuedWork("reuse of memory", block.overwrite))

        return give_back
