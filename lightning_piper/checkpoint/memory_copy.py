"""Copies of a fit's state in memory that all processes of a run share. If the fit loses a process, it continues from
these copies.

Each process copies its own shards, and its part of the tensors that several processes hold. The memory belongs to rank
0, so it stays if another process is lost. Each process has memory for two copies, because it may be lost while it makes
one of them.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from lightning_piper.checkpoint.late_copies import HostRoom, LateCopies
from lightning_piper.checkpoint.sharded_checkpoint import OpenedCheckpoint
from lightning_piper.checkpoint.snapshot import pickled, unpickled
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.errors import PiperError
from lightning_piper.processes.background import BackgroundThread
from lightning_piper.processes.world import World
from lightning_piper.runtime.connections import wait_for
from lightning_piper.runtime.same_machine.mapped_memory import Mapped

MEMORY = "memory"  # the path of these copies, as the Trainer shows it
SEGMENT = 1 << 20  # smallest number of bytes that are mapped at once
ALIGNMENT = 64
SHARE = 0.03  # of the training's time, the most that copies take
NUMBER, PLACE, SIZE, INTERVAL = range(4)  # the numbers in the head of a file


class SharedRoom(HostRoom):
    """A pool of memory in a file that other processes can read. It has the copies of one checkpoint at a time.

    Attributes:
        places: Address of memory that was taken -> its place in the file.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file, self._end = file, mmap.PAGESIZE
        self._segments: list[tuple[int, int, Mapped]] = []  # place, size, memory
        self._segment = self._used = 0  # where the next memory is taken
        self.places: dict[int, int] = {}

    def begin(self) -> None:
        """Make all memory available again."""
        self._segment = self._used = 0
        self.places = {}

    def take(self, size: int, pinned: bool) -> torch.UntypedStorage:
        """Return memory of `size` bytes, which no other copy uses until the next `begin`."""
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        while self._segment < len(self._segments) and begin + size > self._segments[self._segment][1]:
            self._segment, begin = self._segment + 1, 0
        if self._segment == len(self._segments):
            length = -(-max(size, SEGMENT) // mmap.PAGESIZE) * mmap.PAGESIZE
            if os.fstat(self._file).st_size < self._end + length:
                os.ftruncate(self._file, self._end + length)
            self._segments.append((self._end, length, Mapped(self._file, self._end, length)))
            self._end += length
        place, _, memory = self._segments[self._segment]
        self._used = begin + size
        taken = torch.frombuffer(memory.room, dtype=torch.uint8, count=size, offset=begin).untyped_storage()
        self.places[taken.data_ptr()] = place + begin
        return taken


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a file: the place and the size of its memory, and the attributes of the tensor."""

    place: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, room: SharedRoom) -> TensorInFile:
        memory = tensor.untyped_storage()
        place, offset = room.places[memory.data_ptr()], int(tensor.storage_offset())
        layout = offset, tuple(tensor.shape), tensor.stride()
        return cls(place, memory.nbytes(), tensor.dtype, *layout, tensor.requires_grad)

    def read(self, memory: Mapped) -> torch.Tensor:
        """Return the tensor, in the memory of the file."""
        found = torch.frombuffer(memory.room, dtype=torch.uint8, count=self.nbytes, offset=self.place)
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(found.untyped_storage(), self.offset, self.shape, self.strides)
        return tensor


class MemoryCopy:
    """One copy of the state of one process, in a file. The file begins with the number of the copy, the place and the
    size of a table of its content, and an interval.

    Args:
        file: The file's descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file, self._room = file, SharedRoom(file)
        if not os.fstat(file).st_size:
            os.ftruncate(file, mmap.PAGESIZE)
        self._memory = Mapped(file, 0, mmap.PAGESIZE)
        self._head = memoryview(self._memory.room).cast("B").cast("q")

    @property
    def number(self) -> int:
        """The number of batches done before the copy, in all epochs; -1 without a complete copy."""
        return self._head[NUMBER] - 1

    @number.setter
    def number(self, value: int) -> None:
        self._head[NUMBER] = value + 1

    @property
    def interval(self) -> int:
        """The number of batches between the copy after this copy and the next one."""
        return self._head[INTERVAL]

    def write(
        self, content: dict[str, Any], ranges: Sequence[TensorRange], steady: Collection[int], interval: int
    ) -> LateCopies:
        """Begin a copy. It is complete after `make` of the result. Then set its number."""
        self.number, self._head[INTERVAL] = -1, interval
        late = LateCopies(self._room, steady)
        parts = [
            (x.key, x.spec, x.start, x.stop, TensorInFile.of(late.later(x.tensor), self._room))
            for x in ranges
            if x.start < x.stop
        ]
        data, tensors = pickled(content, late)
        table = pickle.dumps((data, [TensorInFile.of(x, self._room) for x in tensors], parts))
        place = self._room.take(len(table), False)
        torch.empty(0, dtype=torch.uint8).set_(place).copy_(
            torch.frombuffer(bytearray(table), dtype=torch.uint8)
        )
        self._head[PLACE], self._head[SIZE] = self._room.places[place.data_ptr()], len(table)
        return late

    def read(
        self,
    ) -> tuple[Callable[[], dict[str, Any]], list[tuple[str, dict[str, Any], int, int, torch.Tensor]]]:
        """Return a function that makes the content, and for each range its key, spec, start, stop and elements. The
        elements lie in the memory of the file."""
        memory = Mapped(self._file, 0, os.fstat(self._file).st_size)
        table = memoryview(memory.room).cast("B")[self._head[PLACE] : self._head[PLACE] + self._head[SIZE]]
        data, tensors, parts = pickle.loads(table)

        def content() -> dict[str, Any]:
            found: dict[str, Any] = unpickled(
                data, [x.read(memory).clone().requires_grad_(x.requires_grad) for x in tensors]
            )
            return found

        return content, [(*part, stored.read(memory)) for *part, stored in parts]


@dataclass(frozen=True)
class MemoryCheckpoint(OpenedCheckpoint):
    """The copies of all processes as a checkpoint.

    Attributes:
        parts: Key of a tensor -> start, stop and elements of each range that a process has copied.
        others: For each other process of the copies, a function that returns the content of its copy, and whether the
            process is lost. Empty if the run has as many processes as when it made the copies.
    """

    parts: Mapping[str, Sequence[tuple[int, int, torch.Tensor]]]
    others: Sequence[tuple[Callable[[], dict[str, Any]], bool]]

    def read(self, ranges: Sequence[TensorRange], world: World) -> None:
        """Read ranges.

        Raises:
            PiperError: No process has copied some of the elements.
        """
        for part in ranges:
            left = part.stop - part.start
            for start, stop, elements in self.parts[part.key]:
                first, last = max(start, part.start), min(stop, part.stop)
                if first < last:
                    into = part.tensor.detach()[first - part.start : last - part.start]
                    into.copy_(elements[first - start : last - start])
                    left -= last - first
            if left:
                raise PiperError(
                    f"the copies in memory lack {left} of the elements {part.start}:{part.stop} of {part.key}. Remove "
                    "spares, and report this [PIPER-K013]"
                )


@dataclass(frozen=True)
class CompleteCopies:
    """The latest copies that all processes of a run have.

    Attributes:
        number: As `MemoryCopy.number`.
        size: Number of processes when the run made the copies.
        ranks: For each process that the run has now, its rank among them.
    """

    number: int
    size: int
    ranks: Sequence[int]


class MemoryCopies:
    """The copies of the state of all processes.

    Copies are made so rarely that they take at most `SHARE` of the time. Rank 0 measures its copies, and writes into
    each of them how many batches are between the next two copies. The other processes read this when they make the
    next copy, so all processes make copies before the same batches.

    Args:
        files: For each rank, the descriptors of two files. When no process needs the copies of a lost process any more,
            its files are closed, and removed from this list.
        lost: Returns whether a process is lost.

    Attributes:
        late: The copy that this process makes.
    """

    def __init__(self, files: list[tuple[int, int]], lost: Callable[[], bool]) -> None:
        self._files = files
        self._of_ranks = [[MemoryCopy(file) for file in pair] for pair in files]
        self._size = len(files)
        self._earlier = CompleteCopies(-1, 0, [])  # the copies from before the run had fewer processes
        self._lost, self._behind = lost, BackgroundThread("piper-spares")
        self.late = LateCopies(HostRoom())
        self._due = 0  # the number of the next copy
        self._checked = 0.0  # the time of the last call of `is_due`
        self._begun: tuple[int, float] | None = None  # number and time of the last copy
        self._seconds = 0.0  # of processor time that the last copy took, also in the thread

    @property
    def number(self) -> int:
        """The number of the latest copies that all processes have; -1 if they have none."""
        return self._latest.number

    @property
    def _latest(self) -> CompleteCopies:
        number = min(max(copy.number for copy in copies) for copies in self._of_ranks[: self._size])
        own = CompleteCopies(number, self._size, range(self._size))
        return max(self._earlier, own, key=lambda copies: copies.number)

    def continue_on(self, ranks: Sequence[int]) -> None:
        """Continue after a loss, perhaps with fewer processes.

        Args:
            ranks: The rank of each process before.
        """
        self._due, self._begun = 0, None
        if len(ranks) == self._size:
            return
        latest = self._latest
        self._earlier = replace(latest, ranks=[latest.ranks[rank] for rank in ranks])
        # Some of these processes may already have newer copies, which are not for fewer processes.
        for copy in chain(*self._of_ranks):
            copy.number = -1 if copy.number > latest.number else copy.number
        self._size = len(ranks)

    def is_due(self, number: int) -> bool:
        """Return whether the processes make a copy now, after this number of batches in all epochs."""
        self._checked = time.perf_counter()
        return number >= self._due

    def keep(
        self,
        rank: int,
        content: dict[str, Any],
        ranges: Sequence[TensorRange],
        number: int,
        steady: Collection[int],
    ) -> None:
        """Replace the older copy of this process by a copy of its state. A thread makes most of it. Call this soon after
        `is_due`.

        Args:
            rank: The rank of this process.
            content: The content of a checkpoint, with references in place of the tensors in `ranges`.
            ranges: The ranges that this process copies.
            number: The number of batches done before, in all epochs.
            steady: As for `LateCopies`.
        """
        self.wait()
        older, newer = sorted(self._of_ranks[rank], key=lambda copy: copy.number)
        # Until then, another process may still need the older copies of all processes.
        wait_for(lambda: self.number >= newer.number, self._lost)
        self._end_lost()
        first = next((copy for copy in self._of_ranks[0] if copy.number == newer.number >= 0), None)
        self._due = number + (1 if first is None else first.interval)
        self.late = late = older.write(content, ranges, steady, self._interval(number))
        main = time.perf_counter() - self._checked

        def make() -> None:
            begin = time.thread_time()
            late.make()
            self._seconds = main + time.thread_time() - begin
            older.number = number

        self._begun = number, self._checked
        self._behind.start(make)
        late.watch()

    def _interval(self, number: int) -> int:
        """Return the number of batches after which the last copy takes at most `SHARE` of the time."""
        if self._begun is None:
            return 1
        before, begun = self._begun
        batch = (self._checked - begun) / (number - before)
        return max(1, math.ceil(self._seconds / (SHARE * batch)))

    def take(self, rank: int) -> MemoryCheckpoint:
        """Return the latest copies that all processes have. Drop newer copies of this process."""
        latest = self._latest
        for copy in self._of_ranks[rank]:
            copy.number = -1 if copy.number > latest.number else copy.number
        found = [
            next(copy for copy in copies if copy.number == latest.number).read()
            for copies in self._of_ranks[: latest.size]
        ]
        specs: dict[str, dict[str, Any]] = {}
        parts: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
        for _, ranges in found:
            for key, spec, start, stop, elements in ranges:
                specs[key] = spec
                parts.setdefault(key, []).append((start, stop, elements))
        contents, own = [content for content, _ in found], latest.ranks[rank]
        others = [(content, each not in latest.ranks) for each, content in enumerate(contents) if each != own]
        fewer = len(latest.ranks) < latest.size
        return MemoryCheckpoint(MEMORY, contents[own](), specs, parts, others if fewer else [])

    def wait(self) -> None:
        """Wait until the copy of this process is complete."""
        self.late.settle()
        self._behind.wait()

    def _end_lost(self) -> None:
        """Close the files of lost processes if all processes have newer copies."""
        while len(self._files) > self._size and self._earlier.number < self.number:
            self._of_ranks.pop()
            for file in self._files.pop():
                os.close(file)
