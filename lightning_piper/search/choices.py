"""The branches of a search below a layout: what is recomputed and offloaded, and the cuts of one such choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_piper.search.bounds import Cutting
from lightning_piper.search.estimate import AGAIN, AWAY, PLAIN, Way
from lightning_piper.search.space import Candidate, Layout
from lightning_piper.simulate.durations import Number


class Choice(NamedTuple):
    """Stages before `again` recompute, and those from there to `away` offload. Each is one of a range, both ends included."""

    layout: Layout
    zero: int
    again: tuple[int, int]
    away: tuple[int, int]

    @property
    def kinds(self) -> int:
        """How many pairs of them there are: `again` is no larger than `away`."""
        return sum(max(0, self.away[1] - max(k, self.away[0]) + 1) for k in range(self.again[0], self.again[1] + 1))

    def ways(self) -> list[list[Way]]:
        """In which ways each stage may keep less; the fastest first."""
        return [
            [PLAIN] * (s >= self.away[0]) + [AGAIN] * (s < self.again[1]) + [AWAY] * (self.again[0] <= s < self.away[1])
            for s in range(self.layout.stages)
        ]

    def halves(self) -> list[Choice]:
        """Two smaller ones; none if this is one."""
        (k, most), (o, far) = self.again, self.away
        if most - k >= far - o:
            if k == most:
                return []
            middle = (k + most) // 2
            both = [self._replace(again=(k, middle)), self._replace(again=(middle + 1, most))]
        else:
            middle = (o + far) // 2
            both = [self._replace(away=(o, middle)), self._replace(away=(middle + 1, far))]
        return [half for half in both if half.kinds]

    def candidate(self, cuts: tuple[int, ...]) -> Candidate:
        """With as little recomputed and offloaded as it has."""
        return Candidate(self.layout, self.zero, self.again[0], max(self.away[0] - self.again[0], 0), cuts)


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
