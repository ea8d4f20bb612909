"""Branches of a search below a layout: ZeRO levels, recomputed and offloaded stages, and cuts.

Along the chain of stages, ZeRO levels never rise. Stages that recompute come first, then stages that offload,
then stages that keep on the device everything that they save. One of these three is the way of a stage. So
runs of consecutive stages have one level, and three runs of stages have one way. The ends of the runs
determine all levels and ways. The ends never fall along the chain, and the end of the last run is the number
of stages.

Example with 8 stages: the levels (3, 1) with the end 2 mean that the stages 0 and 1 have level 3, and the
stages 2 to 7 level 1. The ends 1 and 4 of the ways mean that stage 0 recomputes, and the stages 1 to 3
offload.
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
_WAYS = (AGAIN, AWAY, PLAIN)  # in their order along the chain


class Choice(NamedTuple):
    """A set of choices of the levels and ways of a layout's stages: a range for each end of a run of stages.
    The search halves ranges until each has one end.

    Attributes:
        layout: The layout of the stages.
        levels: ZeRO levels in their order along the chain: the highest first.
        shared: For each level but the last, the range of its possible ends. An end is the first stage after
            the stages with this level. A level with the end of the level before it has no stages.
        kept: The range of possible ends of the stages that recompute, and then of the stages that offload.
    """

    layout: Layout
    levels: tuple[int, ...]
    shared: tuple[Range, ...]
    kept: tuple[Range, ...]

    @property
    def kinds(self) -> int:
        """The number of choices in this set. The ends of a choice never fall along the chain."""
        return _rising(self.shared) * _rising(self.kept)

    def options(self) -> list[list[Option]]:
        """Return, for each stage, all (level, way) that some choice of this set gives it."""
        return [
            [(self.levels[k], _WAYS[w]) for k in _open(self.shared, s) for w in _open(self.kept, s)]
            for s in range(self.layout.stages)
        ]

    def halves(self) -> list[Choice]:
        """Divide the set into smaller sets, one or two, by halving its longest range. Return an empty list if
        it has only one choice."""
        if self.kinds == 1:
            return []
        ends = [*self.kept, *self.shared]
        k = max(range(len(ends)), key=lambda k: ends[k][1] - ends[k][0])
        first, last = ends[k]
        middle = (first + last) // 2
        both = [
            self._with([*ends[:k], half, *ends[k + 1 :]]) for half in ((first, middle), (middle + 1, last))
        ]
        return [half for half in both if half.kinds]

    def _with(self, ends: Sequence[Range]) -> Choice:
        """Return a set with other ranges: the ranges of `kept`, then the ranges of `shared`."""
        own = len(self.kept)
        return self._replace(kept=_narrowed(ends[:own]), shared=_narrowed(ends[own:]))

    def candidate(self, cuts: tuple[int, ...]) -> Candidate:
        """Return the candidate with these cuts that has the lowest levels and the fewest stages that
        recompute or offload."""
        again, away = (first for first, _ in self.kept)
        return Candidate(self.layout, self.least, again, away - again, cuts)

    @property
    def least(self) -> tuple[int, ...]:
        """For each stage, the lowest level that the set allows."""
        return tuple(self.levels[max(_open(self.shared, s))] for s in range(self.layout.stages))

    @property
    def most(self) -> tuple[int, ...]:
        """For each stage, the highest level that the set allows."""
        return tuple(self.levels[min(_open(self.shared, s))] for s in range(self.layout.stages))


def everything(layout: Layout, levels: tuple[int, ...]) -> Choice:
    """Return the set of all choices of a layout with any of these ZeRO levels.

    Args:
        levels: ZeRO levels, the highest first: a set of `Space.levels_of`.
    """
    some = (0, layout.stages)
    shared = [some] * (len(levels) - 1)
    if shared and layout.groups > 1 and not levels[-1]:
        shared[-1] = (1, layout.stages)  # `shards_some`
    return Choice(layout, levels, tuple(shared), (some, some))


def _open(ends: Sequence[Range], stage: int) -> list[int]:
    """Return the indices of the runs (of one level or one way) that may contain a stage. `ends` has the range
    of the end of each run but the last."""
    return [
        k
        for k in range(len(ends) + 1)
        if (k == 0 or ends[k - 1][0] <= stage) and (k == len(ends) or stage < ends[k][1])
    ]


def _rising(ends: Sequence[Range]) -> int:
    """Return in how many ways one can choose an end from each range so that the ends never fall."""
    found = {0: 1}
    for first, last in ends:
        found = {
            end: sum(n for before, n in found.items() if before <= end) for end in range(first, last + 1)
        }
    return sum(found.values())


def _narrowed(ends: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges without the ends that no sequence of ends contains, because its ends would fall.

    Example: ((0, 4), (0, 2)) becomes ((0, 2), (0, 2)).
    """
    first = list(accumulate((first for first, _ in ends), max))
    last = list(accumulate((last for _, last in reversed(ends)), min))
    return tuple(zip(first, reversed(last), strict=True))


@dataclass
class Cuts:
    """A branch of the search: all cuts of one choice. The search changes this object.

    The bound of a cut may be below the bound of the branch, because the branch's bound may come from
    `joint_bounds`.

    Attributes:
        choice: The set that contains only this choice.
        cutting: The bounds of its cuts.
        left: Number of cuts not counted as tried.
        done: All cuts with a bound below this limit were tried. 0: there is no such limit yet.
        seen: Cuts that were tried.
        above: The tried cuts that fit and were not estimated, because their bound excluded them.
    """

    choice: Choice
    cutting: Cutting
    left: int
    done: Number = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    above: set[tuple[int, ...]] = field(default_factory=set)

    def again(self) -> None:
        """Allow the search to try the cuts in `above` again, after the limit of the search has risen."""
        self.done, self.seen, self.above = 0, self.seen - self.above, set()
