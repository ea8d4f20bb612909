"""The branches of a search below a layout: what is shared, recomputed and offloaded, and the cuts of one such choice.

Along the chain levels of ZeRO fall, and so does how little a stage keeps: first come those that recompute, then those that offload.
So both are said by where each but the last of them ends, and these ends rise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from lightning_piper.search.bounds import Cutting
from lightning_piper.search.estimate import AGAIN, AWAY, PLAIN, Option
from lightning_piper.search.space import Candidate, Layout
from lightning_piper.simulate.durations import Number

Range = tuple[int, int]  # both ends included
_WAYS = (AGAIN, AWAY, PLAIN)  # along the chain


class Choice(NamedTuple):
    """Some of what the stages of a layout may share and keep.

    Attributes:
        layout: of the stages.
        levels: of ZeRO, along the chain: the highest first.
        shared: before which stage each of the levels but the last ends, one of a range.
        kept: before which stage those end that recompute, and those that offload, each one of a range.
    """

    layout: Layout
    levels: tuple[int, ...]
    shared: tuple[Range, ...]
    kept: tuple[Range, ...]

    @property
    def kinds(self) -> int:
        """How many there are: ends rise."""
        return _rising(self.shared) * _rising(self.kept)

    def options(self) -> list[list[Option]]:
        """The levels and ways that each stage may have."""
        return [
            [(self.levels[k], _WAYS[w]) for k in _open(self.shared, s) for w in _open(self.kept, s)]
            for s in range(self.layout.stages)
        ]

    def halves(self) -> list[Choice]:
        """Two smaller ones; none if this is one."""
        if self.kinds == 1:
            return []
        ends = [*self.kept, *self.shared]
        k = max(range(len(ends)), key=lambda k: ends[k][1] - ends[k][0])
        first, last = ends[k]
        middle = (first + last) // 2
        both = [self._with([*ends[:k], half, *ends[k + 1 :]]) for half in ((first, middle), (middle + 1, last))]
        return [half for half in both if half.kinds]

    def _with(self, ends: Sequence[Range]) -> Choice:
        own = len(self.kept)
        return self._replace(kept=_narrowed(ends[:own]), shared=_narrowed(ends[own:]))

    def candidate(self, cuts: tuple[int, ...]) -> Candidate:
        """With as little shared, recomputed and offloaded as it has."""
        again, away = (first for first, _ in self.kept)
        return Candidate(self.layout, self.least, again, away - again, cuts)

    @property
    def least(self) -> tuple[int, ...]:
        """The lowest levels of the stages."""
        return tuple(self.levels[max(_open(self.shared, s))] for s in range(self.layout.stages))

    @property
    def most(self) -> tuple[int, ...]:
        """The highest levels of the stages."""
        return tuple(self.levels[min(_open(self.shared, s))] for s in range(self.layout.stages))


def everything(layout: Layout, levels: tuple[int, ...]) -> Choice:
    """All of a layout with any of these levels, the highest first."""
    some = (0, layout.stages)
    return Choice(layout, levels, (some,) * (len(levels) - 1), (some, some))


def _open(ends: Sequence[Range], stage: int) -> list[int]:
    """Which parts of the chain a stage may lie in, if these are their ends."""
    return [
        k for k in range(len(ends) + 1)
        if (k == 0 or ends[k - 1][0] <= stage) and (k == len(ends) or stage < ends[k][1])
    ]  # fmt: skip


def _rising(ends: Sequence[Range]) -> int:
    """In how many ways these ends can be chosen so that none is before the last one."""
    found = {0: 1}
    for first, last in ends:
        found = {end: sum(n for before, n in found.items() if before <= end) for end in range(first, last + 1)}
    return sum(found.values())


def _narrowed(ends: Sequence[Range]) -> tuple[Range, ...]:
    """Without ends that none before, or none behind, go with."""
    first = list(accumulate((first for first, _ in ends), max))
    last = list(accumulate((last for _, last in reversed(ends)), min))
    return tuple(zip(first, reversed(last), strict=True))


@dataclass
class Cuts:
    """Cuts of one choice. Some have a bound below that of the branch, which may know more.

    Attributes:
        choice: what they are the cuts of.
        cutting: their bounds.
        left: how many were not tried.
        done: the limit below which all were.
        seen: those that were.
        above: those of them that only their bound left out.
    """

    choice: Choice
    cutting: Cutting
    left: int
    done: Number = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    above: set[tuple[int, ...]] = field(default_factory=set)

    def again(self) -> None:
        """Those that only their bound left out may be tried again."""
        self.done, self.seen, self.above = 0, self.seen - self.above, set()
