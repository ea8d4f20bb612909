"""Detects races: work that uses memory before earlier work on the same memory is done.

Work is noted with the memory that it reads or writes when it is issued, and removed when it has run. A
conflict is work that runs while earlier work on the same bytes is pending, unless both only read. Work
without a conflict reads the same values as if all work ran in the order of issue. So a run without conflicts
gives bit for bit the numbers of a device that does everything in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Access:
    """A range of bytes of a storage that work reads or writes.

    Attributes:
        storage: Address of the storage.
        first, end: The range of bytes, counted from the start of the storage. `end` is exclusive.
        writes: Whether the work changes the bytes.
    """

    storage: int
    first: int
    end: int
    writes: bool

    @classmethod
    def of(cls, x: torch.Tensor, writes: bool) -> Access:
        """Return the access to the bytes from the first to the last element of a tensor that is not empty.
        Gaps between elements are included."""
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        first, size = int(x.storage_offset()), x.element_size()
        return cls(x.untyped_storage().data_ptr(), first * size, (first + last + 1) * size, writes)

    def meets(self, other: Access) -> bool:
        """Return whether this access conflicts with another access to the same storage: the ranges overlap,
        and one of the two writes."""
        return (self.writes or other.writes) and self.first < other.end and other.first < self.end


def accesses_of(tensors: Iterable[tuple[torch.Tensor, bool]]) -> list[Access]:
    """Return the accesses of work to tensors without the empty tensors. A pair is a tensor, and whether the
    work changes it."""
    return [Access.of(x, writes) for x, writes in tensors if x.numel()]


@dataclass(frozen=True, slots=True)
class Note:
    """A piece of pending work.

    Attributes:
        number: The work's number in the order of issue.
        what: The work's name in messages, with its queue.
        accesses: The memory that the work uses.
    """

    number: int
    what: str
    accesses: list[Access]


class Conflicts:
    """A record of the pending work of all queues, which finds work that runs too early."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, dict[int, Note]] = {}  # address of a storage -> number of a work -> the work

    def issued(self, what: str, accesses: list[Access]) -> Note:
        """Record that work is issued now, and return its note. Pass the note to `ran` when the work runs."""
        note = Note(next(self._numbers), what, accesses)
        for access in accesses:
            self._waiting.setdefault(access.storage, {})[note.number] = note
        return note

    def ran(self, note: Note) -> Iterator[str]:
        """Remove work that runs now, and yield a message for each earlier pending work that conflicts with
        it."""
        for storage in {access.storage for access in note.accesses}:
            there = self._waiting[storage]
            del there[note.number]
            if not there:
                del self._waiting[storage]
        yield from self.before(note.what, note.accesses, note.number)

    def before(self, what: str, accesses: Iterable[Access], number: int | None = None) -> Iterator[str]:
        """Yield a message for each pending work that was issued before the work that runs now, and conflicts
        with it.

        Args:
            what: Name of the work that runs now.
            accesses: The memory that this work uses.
            number: The number of this work in the order of issue. None: all pending work was issued before.
        """
        found: dict[int, Note] = {}
        for access in accesses:
            for other, note in self._waiting.get(access.storage, {}).items():
                if (number is None or other < number) and any(
                    access.meets(each) for each in note.accesses if each.storage == access.storage
                ):
                    found[other] = note
        for other in sorted(found):
            yield (
                f"{what} does not wait for {found[other].what}, which uses the same memory before it: an "
                "event is missing"
            )
