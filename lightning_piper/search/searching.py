"""The best candidate of a space, by branch and bound, the lowest bound first (Land and Doig 1960).

    layout  ->  level of ZeRO  ->  what is recomputed and offloaded  ->  cuts below a limit, which rises

A branch is left out when its bound is no better than the best candidate so far, or when no cut of it can fit; see `bounds`. What
lies under a branch is made when its bound is the lowest one left, so what is left at any time is no better than that bound.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from lightning_piper.errors import SearchError
from lightning_piper.limits import integer, is_number, shown
from lightning_piper.search.bounds import INFINITE, Cutting, bound_of
from lightning_piper.search.coarse import Coarse
from lightning_piper.search.costs import Model
from lightning_piper.search.estimate import AGAIN, AWAY, PLAIN, Way, estimate, memory_of, time_of
from lightning_piper.search.report import Found, Row, reason
from lightning_piper.search.rows import SHAPES
from lightning_piper.search.space import Candidate, Layout, Space, bytes_of
from lightning_piper.search.workload import Workload
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

OBJECTIVES = ("time", "memory")
TABLE = 20  # candidates that are shown
STEPS = 10  # stages that are looked at for the cuts of one branch, for each candidate of the budget
FIRST = 2000  # stages that are looked at for the first cut of a branch
Progress = Callable[[int, float, float], None]


class _Exhausted(Exception):
    """The budget is."""


class _Choice(NamedTuple):
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

    def halves(self) -> list[_Choice]:
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

    def candidate(self, cuts: tuple[int, ...], again: int | None = None) -> Candidate:
        """With as little recomputed and offloaded as it has, or so much recomputed and nothing offloaded."""
        k = self.again[0] if again is None else again
        return Candidate(self.layout, self.zero, k, max(self.away[0] - k, 0) if again is None else 0, cuts)


@dataclass
class _Cuts:
    """Cuts of one choice. Some have a bound below that of the branch, which may know more.

    Attributes:
        left: how many were not tried.
        done: the limit below which all were.
        seen: those that were.
    """

    choice: _Choice
    cutting: Cutting
    left: int
    done: Number = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)


def best_of(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    memory: str | Number | None = None,
    objective: str = "time",
    *,
    schedules: tuple[str, ...] = tuple(SHAPES),
    levels: tuple[int, ...] = (0, 1, 2, 3),
    margin: Number = 0,
    all_devices: bool = False,
    gap: Number = 0,
    budget: int = 5000,
    progress: Progress | None = None,
) -> Found:
    """The program of least time for a step, or of least memory, that fits.

    Args:
        workload, hardware: what is divided, and among what.
        devices: how many there are.
        memory: of each device, bytes or text such as "80GiB"; that of the hardware when left out.
        objective: "time", or "memory": the largest of any device.
        schedules, levels: that are considered: names of builders, levels of ZeRO.
        margin: share of the estimated memory to keep free beside it.
        all_devices: consider only programs that use every device.
        gap: how far from the best one what is found may be: 0.01 for one percent.
        budget: branches that are looked at, and candidates whose time is estimated, at most; what is proved by then is told.
        progress: called with the number of candidates estimated, the lowest bound of what is left, and the best so far.

    Raises:
        SearchError: an argument cannot be used; or nothing fits: says the least memory that would do.
    """
    limit = bytes_of(hardware.memory if memory is None and isinstance(hardware, Hardware) else memory or 0)
    space = Space(workload, hardware, devices, limit, tuple(schedules), tuple(levels), margin, all_devices)
    if objective not in OBJECTIVES:
        raise SearchError(f"search: objective={shown(objective)}; give one of {', '.join(OBJECTIVES)}")
    if not is_number(gap):
        raise SearchError(f"search: gap={shown(gap)}; give a share such as 0.01")
    if (integer(budget) or 0) < 1:
        raise SearchError(f"search: budget={shown(budget)}; give an integer >= 1")
    found = _Search(space, objective == "memory", gap, budget, progress).run()
    if found is not None:
        return found
    if limit == INFINITE:
        raise SearchError(f"search: no schedule of {', '.join(schedules)} exists for this workload on {devices} devices")
    everything = Space(workload, hardware, devices, INFINITE, tuple(schedules), tuple(levels), margin, all_devices)
    least = _Search(everything, True, 0, budget, None).run()
    if least is None:
        raise SearchError(f"search: nothing fits in the {hardware.host_memory} bytes of the host, or no schedule exists")
    needed, about = max(least.estimate.memory), "" if least.gap == 0 else f", or {float(least.gap):.1%} less"
    raise SearchError(f"search: nothing fits in {limit} bytes; the least that would do is {needed} bytes of each device{about}")


class _Search:
    def __init__(self, space: Space, by_memory: bool, gap: Number, budget: int, progress: Progress | None) -> None:
        self.space, self.by_memory, self.gap, self.progress = space, by_memory, gap, progress
        self.model = Model(space)
        self.coarse = Coarse(self.model)
        self.best: Candidate | None = None
        self.value: Number = INFINITE
        self.evaluated = 0
        self.cut: Counter[str] = Counter()
        self.tried: dict[tuple[object, ...], tuple[Number, Candidate]] = {}  # the best of each choice of everything but the cuts
        self.over: list[tuple[Number, Candidate]] = []  # bound, and one that does not fit
        self._budget = self._left = budget
        self._heap: list[tuple[Number, int, int, Layout | _Choice | _Cuts]] = []  # bound, the finest first, number
        self._number = count()
        self._lowest: Number = INFINITE  # bound of what was left out
        self._size = 0

    def run(self) -> Found | None:
        """None if nothing fits."""
        for layout in self.space.layouts():
            self._layout(layout)
        self._begin()
        while self._heap:
            bound, _, _, branch = heapq.heappop(self._heap)
            if self._left < 0 or self._is_excluded(bound):
                self._lowest = min(self._lowest, bound)
                self._leave("bound" if self._is_excluded(bound) else "left", branch)
                continue
            self._branch(bound, branch)
            if self.progress:
                self.progress(self.evaluated, float(bound), float(self.value))
        return self._found()

    def _begin(self) -> None:
        """First candidates, so that bounds have something to exclude: for each number of replicas and degree of the tensor axis,
        those of the chain with the lowest bound; 1F1B, if that may be used, for it keeps least."""
        schedule = "one_f_one_b" if "one_f_one_b" in self.space.schedules else self.space.schedules[0]
        lowest: dict[tuple[int, int], tuple[Number, int, Layout]] = {}
        for bound, _, number, branch in self._heap:
            if isinstance(branch, Layout) and branch.schedule == schedule and branch.stages * branch.microbatches <= FIRST:
                key = (branch.replicas, branch.tensor)
                lowest[key] = min(lowest.get(key, (INFINITE, 0, branch)), (bound, number, branch))
        for _, _, layout in sorted(lowest.values(), key=lambda entry: entry[:2]):
            zero = max(self.space.levels_of(layout))
            choice = _Choice(layout, zero, (0, layout.stages), (0, layout.stages))
            cutting = Cutting(self.model, layout, zero, choice.ways(), self.by_memory)
            low, high = cutting.least(0, self.value)
            first = self._first(cutting, high) if low < high else None
            if first is not None:
                self._dive(choice, first)

    def _is_excluded(self, bound: Number) -> bool:
        return bound * (1 + self.gap) >= self.value

    def _leave(self, why: str, branch: Layout | _Choice | _Cuts) -> None:
        if isinstance(branch, Layout):
            self.cut[why] += self.space.candidates(branch)
        elif isinstance(branch, _Choice):
            self.cut[why] += branch.kinds * self.space.cuts(branch.layout)
        else:
            self.cut[why] += branch.left

    def _push(self, bound: Number, branch: Layout | _Choice | _Cuts) -> None:
        depth = (Layout, _Choice, _Cuts).index(type(branch))
        heapq.heappush(self._heap, (bound, -depth, next(self._number), branch))

    def _layout(self, layout: Layout) -> None:
        """Into the branches that will be looked at, if any can fit."""
        self._size += self.space.candidates(layout)
        coarse = self.coarse.memory(layout)
        if coarse > self.space.memory:
            self._leave("memory", layout)
        else:
            self._push(coarse if self.by_memory else self.coarse.time(layout), layout)

    def _branch(self, bound: Number, branch: Layout | _Choice | _Cuts) -> None:
        if isinstance(branch, Layout):
            for zero in self.space.levels_of(branch):
                self._choose(bound, _Choice(branch, zero, (0, branch.stages), (0, branch.stages)))
        elif isinstance(branch, _Choice):
            for half in branch.halves():
                self._choose(bound, half)
        else:
            self._enumerate(bound, branch)

    def _choose(self, bound: Number, choice: _Choice) -> None:
        """Into the branches, if anything of it can fit and be good enough; with the cuts that its bound is of as a first try."""
        self._left -= 1
        cutting = Cutting(self.model, choice.layout, choice.zero, choice.ways(), self.by_memory)
        if cutting.reach(INFINITE) is None:
            self._leave("memory", choice)
            self._over(bound, choice)
            return
        low, high = cutting.least(bound, self.value)
        one = choice.kinds == 1
        branch = _Cuts(choice, cutting, self.space.cuts(choice.layout)) if one else choice
        self._push(low, branch)
        first = self._first(cutting, high) if low < high else None
        if first is not None and isinstance(branch, _Cuts):
            with contextlib.suppress(_Exhausted):
                self._try(branch, first)
        elif first is not None and choice.again[0] == 0:
            self._dive(choice, first)

    def _first(self, cutting: Cutting, limit: Number) -> tuple[int, ...] | None:
        """Some cut below a limit, if one is found soon: none may be left out for want of it."""
        steps = iter(range(FIRST))
        try:
            return next((cuts for _, cuts in cutting.cuts(limit, lambda: self._spend(steps))), None)
        except _Exhausted:
            return None

    def _dive(self, choice: _Choice, cuts: tuple[int, ...]) -> None:
        """A first good candidate: with these cuts, and as many stages recomputed as it takes to fit. Its branch meets it again."""
        found = bisect_left(range(choice.layout.stages + 1), True, key=lambda k: self._fits(choice.candidate(cuts, k)))
        if found > choice.layout.stages:
            return
        candidate = choice.candidate(cuts, found)
        if not self._is_excluded(self._bound(candidate)):
            self._improve(candidate)

    def _fits(self, candidate: Candidate) -> bool:
        memory, host = memory_of(self.model, candidate)
        return max(memory) <= self.space.memory and max(host) <= self.space.hardware.host_memory

    def _bound(self, candidate: Candidate) -> Number:
        return max(memory_of(self.model, candidate)[0]) if self.by_memory else bound_of(self.model, candidate)

    def _improve(self, candidate: Candidate) -> None:
        """Estimate a candidate that fits."""
        value = max(memory_of(self.model, candidate)[0]) if self.by_memory else time_of(self.model, candidate)
        key = candidate[:4]
        if value < self.tried.get(key, (INFINITE, None))[0]:
            self.tried[key] = (value, candidate)
        if value < self.value:
            self.value, self.best = value, candidate

    def _enumerate(self, bound: Number, branch: _Cuts) -> None:
        """All cuts below a limit that rises towards the best so far: then nothing below it is left."""
        known = self.value < INFINITE
        limit = min(self.value, bound + max(bound / 64, (self.value - bound) / 4)) if known else INFINITE
        steps = iter(range(STEPS * self._budget))
        try:
            for value, cuts in branch.cutting.cuts(limit, lambda: self._spend(steps)):
                if value >= branch.done:
                    self._try(branch, cuts)
                if not known and self.value < INFINITE:
                    limit = bound
                    break
        except _Exhausted:
            self._lowest = min(self._lowest, bound)
            self._leave("left", branch)
            return
        if limit < INFINITE:
            branch.done = max(branch.done, limit if limit > bound else 0)
            self._push(limit, branch)
        else:
            self._leave("memory", branch)

    def _spend(self, steps: Iterator[int]) -> None:
        if next(steps, None) is None:
            raise _Exhausted

    def _try(self, branch: _Cuts, cuts: tuple[int, ...]) -> None:
        """Estimate one candidate, if nothing excludes it. Bounds come first: they cost less."""
        if cuts in branch.seen:
            return
        candidate = branch.choice.candidate(cuts)
        bound = self._bound(candidate)
        if not self._fits(candidate):
            self._count(branch, cuts, "memory")
            self._over(bound, branch.choice, candidate)
            return
        if self._is_excluded(bound):
            self._lowest = min(self._lowest, bound)
            self._count(branch, cuts, "bound")
            return
        self._left -= 1
        if self._left < 0:
            raise _Exhausted
        self._count(branch, cuts, None)
        self._improve(candidate)

    def _count(self, branch: _Cuts, cuts: tuple[int, ...], why: str | None) -> None:
        branch.seen.add(cuts)
        branch.left -= 1
        if why is None:
            self.evaluated += 1
        else:
            self.cut[why] += 1

    def _over(self, bound: Number, choice: _Choice, candidate: Candidate | None = None) -> None:
        """Remember what would be good and does not fit: of a choice none of which does, with stages of equally many blocks."""
        stages, blocks = choice.layout.stages, len(self.space.workload.blocks)
        even = tuple(blocks * s // stages for s in range(1, stages))
        self.over.append((bound, candidate or choice.candidate(even)))
        if len(self.over) > 10 * TABLE:
            self.over = heapq.nsmallest(TABLE, self.over, key=lambda item: item[0])

    def _found(self) -> Found | None:
        if self.best is None:
            return None
        best = estimate(self.model, self.best)
        tried = heapq.nsmallest(TABLE, self.tried.values(), key=lambda item: item[0])
        over = heapq.nsmallest(TABLE, self.over, key=lambda item: item[0])
        rows = []
        for candidate in dict.fromkeys(candidate for _, candidate in (*tried, *over)):
            own = estimate(self.model, candidate)
            why = "" if candidate == self.best else reason(self.space, own, best, self.by_memory)
            rows.append(Row(candidate, own, why))
        rows.sort(key=lambda row: (max(row.estimate.memory) if self.by_memory else row.estimate.time, row.reason != ""))
        gap = self.value / self._lowest - 1 if 0 < self._lowest < self.value else 0
        return Found(self.best, best, gap, tuple(rows[:TABLE]), self._size, dict(self.cut), self.evaluated, self.space)
