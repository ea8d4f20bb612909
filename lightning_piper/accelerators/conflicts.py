"""Who comes to memory before others that the program issued earlier are done with it: a race, and the event that is missing.

Work that reads or changes memory is noted when it is issued, and struck out when it has run. In whatever order queues are taken up,
work must find no earlier work on the same bytes still waiting, unless both only read: then it sees what it would see if all was
done at once. So a run without conflicts gives the numbers of a device that does everything in order, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a storage that work comes to.

    Attributes:
        storage: its address.
        first, end: of the bytes.
        writes: it changes them.
    """

    storage: int
    first: int
    end: int
    writes: bool

    @classmethod
    def of(cls, x: torch.Tensor, writes: bool) -> Access:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        first, size = int(x.storage_offset()), x.element_size()
        return cls(x.untyped_storage().data_ptr(), first * size, (first + last + 1) * size, writes)

    def meets(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.first < other.end and other.first < self.end


def accesses_of(tensors: Iterable[tuple[torch.Tensor, bool]]) -> list[Access]:
    """Of tensors, and whether they are changed."""
    return [Access.of(x, writes) for x, writes in tensors if x.numel()]


@dataclass(frozen=True, slots=True)
class Note:
    """Work that is still to run.

    Attributes:
        number: in the order of issue.
        what: for messages, with its queue.
    """

    number: int
    what: str
    accesses: list[Access]


class Conflicts:
    """The work of all queues that is still to run."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, dict[int, Note]] = {}  # storage -> number -> work

    def issued(self, what: str, accesses: list[Access]) -> Note:
        note = Note(next(self._numbers), what, accesses)
        for access in accesses:
            self._waiting.setdefault(access.storage, {})[note.number] = note
        return note

    def ran(self, note: Note) -> Iterator[str]:
        """What is wrong with its running now. Whatever is, it has run."""
        for storage in {access.storage for access in note.accesses}:
            there = self._waiting[storage]
            del there[note.number]
            if not there:
                del self._waiting[storage]
        yield from self.before(note.what, note.accesses, note.number)

    def before(self, what: str, accesses: Iterable[Access], number: int | None = None) -> Iterator[str]:
        """What was issued before, by number or until now, and should be done before these accesses."""
        found: dict[int, Note] = {}
        for access in accesses:
            for other, note in self._waiting.get(access.storage, {}).items():
                if (number is None or other < number) and any(access.meets(each) for each in note.accesses
                                                              if each.storage == access.storage):  # fmt: skip
                    found[other] = note
        for other in sorted(found):
            yield f"{what} does not wait for {found[other].what}, which comes to the same memory first: an event is missing"
