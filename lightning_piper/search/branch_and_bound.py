"""The best candidate of a space, by best-first branch and bound (Land and Doig 1960). `best_of` runs this
search.

A branch is a set of candidates. The search divides branches in this order:

    a family of layouts (`Family`)  ->  a layout (`Layout`)  ->
          ZeRO levels, stages that recompute and offload (`Choice`)  ->  cuts (`Cuts`)

The search tries the cuts of one choice in rounds. A round tries the cuts whose bound is below a limit, and
this limit rises from round to round.

The objective is the seconds of a step, or the bytes of the fullest device. The search skips a branch if the
branch's bound is not below the objective of the best candidate so far, or if none of its cuts can fit; see
`bounds`. The search expands the branch with the lowest bound first, so this bound holds for all open
branches.

The search has two phases. In the first phase, it looks for the best candidate, until it has a proof or until
the budget is spent. In the second phase, it expands open branches further to find the next best choices.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from operator import add, length_hint

from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.search.bounds import INFINITE, Cutting, bound_of
from lightning_piper.search.choices import Choice, Cuts, everything
from lightning_piper.search.coarse_bounds import Coarse
from lightning_piper.search.estimate import Estimate, bytes_of_ranks, estimate, memory_of, time_of
from lightning_piper.search.joint_bounds import Together
from lightning_piper.search.report import CandidateRow, Found, reason
from lightning_piper.search.space import Candidate, Family, Layout, Space, shards_some
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.simulate.durations import Number

TABLE = 20  # largest number of rows of the result's table with candidates that fit
OVER = 5  # largest number of further rows: candidates that would be better but do not fit
ALTERNATIVES = 1000  # largest budget of the second phase, which fills the result's table
UNIT = 100  # to expand a choice costs 1 + stages x (microbatches + 100) / UNIT units of the budget
ROWS = 400  # the first visit of a layout costs 1 unit of the budget, and 1 for each ROWS forward passes
STEPS = 50  # enumerating cuts costs 1 unit of the budget for each STEPS stages considered
BEGIN = 400  # largest number of layouts that `_begin` tries for each size of the tensor axis
REFINED, NEIGHBORS = 5, 150  # `_refine` tries up to 150 neighbors, from each of the 5 best candidates
PASSES = 2500  # largest number of forward passes of a layout that `_begin` tries
FIRST = 2000  # `_first` gives up after it has considered this many stages
# Called after each branch of the first phase. Gets the number of estimated candidates, the lowest bound of
# open branches, and the best objective so far (infinite: no candidate that fits is known).
Progress = Callable[[int, float, float], None]
_Branch = Family | Layout | Choice | Cuts


class _Exhausted(Exception):
    """A signal that the budget is spent."""


class Search:
    """One search of a space. `best_of` explains `gap`, `budget` and `progress`.

    With `by_memory`, the objective is the bytes of the fullest device, otherwise the seconds of a step.
    """

    def __init__(
        self, space: Space, by_memory: bool, gap: Number, budget: int, progress: Progress | None
    ) -> None:
        """Prepare the search. Call `run` once: it uses up this object."""
        self.space, self.by_memory, self.gap, self.progress = space, by_memory, gap, progress
        self.model = CostModel(space)
        self.coarse, self.together = Coarse(self.model), Together(self.model)
        self.best: Candidate | None = None
        self.value: Number = INFINITE  # objective of `best`
        self.evaluated = 0  # number of candidates that `_try` has estimated
        self.cut: Counter[str] = Counter()  # reason -> number of candidates that were skipped
        # Layout, levels, recomputed and offloaded stages -> the best candidate with them and its objective.
        self.tried: dict[tuple[object, ...], tuple[Number, Candidate]] = {}
        self.over: list[tuple[Number, Candidate]] = []  # (bound, candidate) of candidates that do not fit
        self._budget = self._left = budget
        # (bound, kind of branch, serial number, branch)
        self._heap: list[tuple[Number, int, int, _Branch]] = []
        self._number = count()
        self.lowest: Number = INFINITE  # lowest bound of all skipped branches and candidates
        self.complete = False  # whether the budget sufficed to consider all candidates
        self._size = 0  # number of candidates of the space
        # (bound, candidate) of the candidates with even cuts that fit; from `_begin`
        self._even_ones: list[tuple[Number, Candidate]] = []
        self._looked_at: set[Layout | Choice] = set()  # branches whose bound `_branch` has raised
        self._fills_table = False  # whether the second phase runs

    @uncollected()
    def run(self, table: bool = True, known: Candidate | None = None) -> Found | None:
        """Search, and return the result. Return None if nothing fits, or if the budget ends before the search
        knows a candidate that fits; see `complete`.

        Args:
            table: Whether the second phase runs. Without it, the table has only choices that the first phase
                tried.
            known: A candidate of the space that fits (default: none is known).
        """
        for family in self.space.families():
            self._family(family)
        heapq.heapify(self._heap)
        if known is not None:
            self._improve(known)
        self._begin()
        self._refine()
        while (
            self._heap
            and not self._is_excluded(self._heap[0][0])
            and (self._left >= 0 or isinstance(self._heap[0][-1], Family))  # a family costs nothing
        ):
            bound, _, _, branch = heapq.heappop(self._heap)
            self._branch(bound, branch)
            if self.progress:
                self.progress(self.evaluated, float(bound), float(self.value))
        if self._left < 0:  # the best candidate may have a better neighbor
            self._refine(far=True)
        # The bounds of these branches exclude them, or the budget did not suffice for them.
        for bound, _, _, branch in self._heap:
            self.lowest = min(self.lowest, bound)
            self._leave("bound" if self._is_excluded(bound) else "left", branch)
        self.complete = not self.cut["left"]
        if self.best is None:
            return None
        evaluated, cut = self.evaluated, dict(self.cut)
        if table:
            self._go_on()
        return self._found(evaluated, cut)

    def _go_on(self) -> None:
        """Run the second phase: add the next best choices to `tried`. Spend at most `ALTERNATIVES` units."""
        self._fills_table, self._left = True, min(self._budget, ALTERNATIVES)
        for _, _, _, branch in self._heap:
            if isinstance(branch, Cuts):
                branch.again()
        while self._heap and self._left >= 0 and self._heap[0][0] < self._limit(None):
            bound, _, _, branch = heapq.heappop(self._heap)
            if bound < self._limit(branch):
                self._branch(bound, branch)
        # If the budget did not suffice, as in a large space, fill the table with candidates that have even
        # cuts.
        for _, candidate in self._even_ones:
            if len(self.tried) >= TABLE:
                break
            self._improve(candidate)

    def _limit(self, branch: _Branch | None) -> Number:
        """Return the limit of the objective: a branch matters only if its bound is below the limit.

        In the first phase, the limit is the objective of the best candidate. In the second phase, it is the
        objective of the last row of a full table. If `tried` has the choice of a `Cuts` branch, the limit is
        at most the objective in `tried`. The limit is infinite if no candidate is known, or while the table
        is not full.
        """
        if not self._fills_table:
            return self.value
        last = heapq.nsmallest(TABLE, (value for value, _ in self.tried.values()))
        limit = last[-1] if len(last) == TABLE else INFINITE
        if isinstance(branch, Cuts):
            limit = min(limit, self.tried.get(branch.choice.candidate(())[:4], (INFINITE, None))[0])
        return limit

    def _begin(self) -> None:
        """Find first candidates. With their objectives, the search can exclude branches.

        For each size of the tensor axis, the function tries up to `BEGIN` layouts with the lowest bounds. All
        stages have one ZeRO level: the highest one, or the lowest but one. The cuts are even, and as many
        stages as necessary recompute or offload.
        """
        families: dict[int, list[tuple[Number, Family]]] = {}
        for bound, _, _, branch in self._heap:
            if isinstance(branch, Family) and branch.ranks * branch.microbatches <= PASSES:
                families.setdefault(branch.tensor, []).append((bound, branch))
        lowest = [item for group in families.values() for item in self._lowest(group)]
        # Try layouts with few passes first.
        for bound, layout in sorted(lowest, key=lambda item: item[1].stages * item[1].microbatches):
            if self._is_excluded(bound) or self._is_excluded(self._raised(bound, layout, rough=True)):
                continue
            levels = sorted(level for any_of in self.space.levels_of(layout) for level in any_of)
            for level in {levels[-1], *levels[:2][-1:]}:  # the highest level, and the lowest but one
                for candidate in self._fitting(layout, (level,) * layout.stages, self._even(layout)):
                    self._even_ones.append((self._bound(candidate), candidate))
                    if not self._is_excluded(self._even_ones[-1][0]):
                        self._improve(candidate)
        self._even_ones.sort()

    def _lowest(self, families: list[tuple[Number, Family]]) -> list[tuple[Number, Layout]]:
        """Return the `BEGIN` layouts of these families with the lowest bounds, with at most `PASSES` passes."""
        found: list[tuple[Number, Layout]] = []
        for bound, family in sorted(families):
            if len(found) == BEGIN and found[-1][0] < bound:
                break
            few = (own for own in family.layouts() if own.stages * own.microbatches <= PASSES)
            more = [(coarse, own) for own in few if (coarse := self._coarse(own)) < INFINITE]
            found = heapq.nsmallest(BEGIN, found + more)
        return found

    def _refine(self, far: bool = False) -> None:
        """Try the neighbors of the best candidates, and move to each neighbor that is better.

        A neighbor differs in one of these ways: one boundary is moved by a block. Some or all stages have a different
        level. One stage less recomputes or offloads. Or one stage offloads instead of recomputing,
        or recomputes instead of offloading.
        With different levels, a further neighbor recomputes and offloads only as many stages as necessary.
        With `far`, try the neighbors of the best candidate alone. Then a neighbor may also differ in all boundaries
        between two stages: the stage with the least work gets a block of the other one.
        """
        for _, candidate in heapq.nsmallest(1 if far else REFINED, self.tried.values()):
            left = NEIGHBORS
            beside = self._beside(candidate, far)
            while left and (other := next(beside, None)) is not None:
                left -= 1
                before = self._value_of(candidate)
                if self._bound(other) < before and self._fits(other):
                    self._improve(other)
                    if self._value_of(other) < before:
                        candidate, beside = other, self._beside(other, far)

    def _value_of(self, candidate: Candidate) -> Number:
        """Return the best objective of the tried candidates that differ from this candidate at most in their
        cuts. There must be one."""
        return self.tried[candidate[:4]][0]

    def _beside(self, candidate: Candidate, far: bool) -> Iterator[Candidate]:
        """Yield the neighbors of a candidate; see `_refine`."""
        layout, levels, again, away, cuts = candidate
        for other in (own for own in self._other_levels(layout, levels) if shards_some(layout, own)):
            yield candidate._replace(levels=other)
            yield from self._fitting(layout, other, cuts)
        for more, further in ((-1, 0), (0, -1), (-1, 1), (1, -1)):
            if again + more >= 0 and away + further >= 0:
                yield candidate._replace(recomputed=again + more, offloaded=away + further)
        edges = (0, *cuts, len(self.space.workload.blocks))
        if far:
            forward = self.model.costs(layout).forward
            least = min(range(layout.stages), key=lambda s: forward[edges[s + 1]] - forward[edges[s]])
            for giver in reversed(range(layout.stages)):
                if giver != least and edges[giver + 1] - edges[giver] > 1:
                    moved = [(least < s <= giver) - (giver < s <= least) for s in range(1, layout.stages)]
                    yield candidate._replace(cuts=tuple(map(add, cuts, moved)))
        for s in range(1, layout.stages):
            for block in (edges[s] - 1, edges[s] + 1):
                if edges[s - 1] < block < edges[s + 1]:
                    yield candidate._replace(cuts=(*cuts[: s - 1], block, *cuts[s:]))

    def _other_levels(self, layout: Layout, levels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield levels of the stages that differ from the given levels. Levels do not rise along the chain.

        First come the levels that are equal for all stages. Then come the given levels with a change of one
        stage, or of as many stages as there are ranks. Levels may come more than once.
        """
        every = self.space.levels_of(layout)
        yield from (
            (level,) * layout.stages for any_of in every for level in any_of if {level} != set(levels)
        )
        for n in sorted({1, layout.ranks}):
            for level in next(any_of for any_of in every if levels[0] in any_of):
                higher, least = sum(own > level for own in levels), sum(own >= level for own in levels)
                if higher >= n:
                    yield (*levels[: higher - n], *(level,) * n, *levels[higher:])
                if least + n <= layout.stages:
                    yield (*levels[:least], *(level,) * n, *levels[least + n :])

    def _whole(self, layout: Layout) -> list[Choice]:
        """Return the first division of a layout: one choice for each set of `Space.levels_of`."""
        return [everything(layout, levels) for levels in self.space.levels_of(layout)]

    def _even(self, layout: Layout) -> tuple[int, ...]:
        """Return the cuts into stages with equal numbers of blocks, or nearly equal ones."""
        return tuple(len(self.space.workload.blocks) * s // layout.stages for s in range(1, layout.stages))

    def _raised(self, bound: Number, branch: Layout | Choice, rough: bool = False) -> Number:
        """Return the larger one of the bound and the branch's bound from all ranks together (`joint_bounds`).
        Of a layout, use the lowest bound of its choices. If the objective is memory, return the given
        bound. `Together.time` explains `rough`."""
        if self.by_memory:
            return bound
        if isinstance(branch, Layout):
            return max(bound, min(self._raised(bound, choice, rough) for choice in self._whole(branch)))
        enough = float(self._limit(None))
        return max(bound, self.together.time(branch.layout, branch.options(), enough, rough))

    def _is_excluded(self, bound: Number, branch: _Branch | None = None) -> bool:
        """Return whether the search can skip candidates with this bound.

        In the first phase, these are candidates that are not better than the best one by more than `gap`. In
        the second phase, these are candidates that would not change the table.
        """
        return bound >= self._limit(branch) if self._fills_table else bound * (1 + self.gap) >= self.value

    def _leave(self, why: str, branch: _Branch) -> None:
        """Add the number of candidates of a skipped branch to `cut[why]`. Cuts that were tried before
        do not count again."""
        if isinstance(branch, Family):
            self.cut[why] += self.space.candidates_of(branch)
        elif isinstance(branch, Layout):
            self.cut[why] += self.space.candidates(branch)
        elif isinstance(branch, Choice):
            self.cut[why] += branch.kinds * self.space.cuts(branch.layout)
        else:
            self.cut[why] += branch.left

    def _push(self, bound: Number, branch: _Branch) -> None:
        """Put a branch into the heap. Of branches with the same bound, families come first, then `Cuts`, choices
        and layouts."""
        kind = (Family, Cuts, Choice, Layout).index(type(branch))
        heapq.heappush(self._heap, (bound, kind, next(self._number), branch))

    def _family(self, family: Family) -> None:
        """Add a family to the branches with its coarse bound, or skip and count it if none of its layouts can fit.
        `run` then makes a heap of the branches."""
        self._size += self.space.candidates_of(family)
        time, memory = self.coarse.least_of(family)
        if memory > self.space.memory:
            self._leave("memory", family)
        else:
            self._heap.append((memory if self.by_memory else time, 0, next(self._number), family))

    def _coarse(self, layout: Layout) -> Number:
        """Return the coarse bound of a layout; infinite if it cannot fit."""
        memory = self.coarse.memory(layout)
        if memory > self.space.memory:
            return INFINITE
        return memory if self.by_memory else self.coarse.time(layout)

    def _branch(self, bound: Number, branch: _Branch) -> None:
        """Expand a branch. A layout or choice that comes here for the first time only gets a higher bound, if
        `joint_bounds` has one, and returns to the heap."""
        if isinstance(branch, Family):
            for layout in branch.layouts():
                coarse = self._coarse(layout)
                if coarse < INFINITE:
                    self._push(coarse, layout)
                else:
                    self._leave("memory", layout)
        elif isinstance(branch, Cuts):
            self._enumerate(bound, branch)
        elif branch not in self._looked_at:
            self._looked_at.add(branch)
            self._left -= 1 + (
                branch.stages * branch.microbatches // ROWS if isinstance(branch, Layout) else 0
            )
            self._push(self._raised(bound, branch), branch)
        elif isinstance(branch, Layout):
            for choice in self._whole(branch):
                self._dive(choice, self._even(branch))
                self._push(bound, choice)
        else:
            self._choose(bound, branch)

    def _choose(self, bound: Number, choice: Choice) -> None:
        """Put the smaller sets of a choice into the heap, or its cuts if it has no smaller sets. Skip and
        count the choice if no cut fits.

        If the choice has no smaller sets, or if no stage of the choice must recompute or offload, immediately
        try a cut whose bound is low enough. This finds a good candidate early.
        """
        self._left -= 1 + choice.layout.stages * (choice.layout.microbatches + 100) // UNIT
        cutting = Cutting(self.model, choice.layout, choice.options(), self.by_memory)
        if cutting.reach(INFINITE) is None:
            self._leave("memory", choice)
            self._over(bound, choice)
            return
        one = choice.kinds == 1
        branch = Cuts(choice, cutting, self.space.cuts(choice.layout)) if one else choice
        low, high = cutting.least(bound, self._limit(branch))
        if isinstance(branch, Cuts):
            self._push(low, branch)
        for half in [] if one else choice.halves():
            self._push(low, half)
        first = self._first(cutting, high) if low < high else None
        if first is not None and isinstance(branch, Cuts):
            with contextlib.suppress(_Exhausted):
                self._try(branch, first)
        elif first is not None and choice.kept[0][0] == choice.kept[1][0] == 0:
            self._dive(choice, first)

    def _first(self, cutting: Cutting, limit: Number) -> tuple[int, ...] | None:
        """Return the cuts of one candidate whose bound is below the limit, or None if the function does not
        find them.

        None does not prove that there are no such cuts, because the function gives up after `FIRST` stages.
        """
        steps = iter(range(FIRST))
        try:
            return next((cuts for _, cuts in cutting.cuts(limit, lambda: self._spend(steps))), None)
        except _Exhausted:
            return None

    def _dive(self, choice: Choice, cuts: tuple[int, ...]) -> None:
        """Try candidates with these cuts and with the lowest and highest levels of a choice, to find a good
        candidate early.

        The branch stays open, so the search may try these candidates again.
        """
        levels = {choice.least, choice.most}
        fitting = [
            (self._bound(candidate), candidate)
            for own in levels
            for candidate in self._fitting(choice.layout, own, cuts)
        ]
        for bound, candidate in sorted(fitting):
            if not self._is_excluded(bound):
                self._improve(candidate)

    def _fitting(self, layout: Layout, levels: tuple[int, ...], cuts: tuple[int, ...]) -> Iterator[Candidate]:
        """Yield up to two candidates with these levels and cuts that fit.

        The first candidate offloads nothing and recomputes as few stages as possible. The second candidate
        offloads some stages. It recomputes as few stages as possible if all later stages offload, and then
        offloads as few of the later stages as possible. There is no second candidate if the first one
        recomputes nothing, or if it takes recomputation of all stages to fit.
        """
        stages = layout.stages
        plain = Candidate(layout, levels, 0, 0, cuts)

        def first(fits: Callable[[int], bool], most: int) -> int:
            return bisect_left(range(most + 1), True, key=fits)

        again = first(lambda k: self._fits(plain._replace(recomputed=k)), stages)
        if again <= stages:
            yield plain._replace(recomputed=again)
        k = first(lambda k: self._fits(plain._replace(recomputed=k, offloaded=stages - k)), stages)
        if again and k < stages:
            rest = plain._replace(recomputed=k)
            yield rest._replace(offloaded=first(lambda o: self._fits(rest._replace(offloaded=o)), stages - k))

    def _fits(self, candidate: Candidate) -> bool:
        """Return whether the candidate fits into the memory of devices and hosts."""
        most, on_host = self.space.memory, self.space.hardware.host_memory
        return all(
            memory <= most and host <= on_host for memory, host in bytes_of_ranks(self.model, candidate)
        )

    def _bound(self, candidate: Candidate) -> Number:
        """Return a lower bound of a candidate's objective. If the objective is memory, it is the
        objective."""
        return max(memory_of(self.model, candidate)[0]) if self.by_memory else bound_of(self.model, candidate)

    def _improve(self, candidate: Candidate) -> None:
        """Estimate the objective of a candidate that fits. Keep the candidate in `tried` if it has the best
        cuts of its choice so far, and in `best` if it is better than all earlier candidates."""
        value = max(memory_of(self.model, candidate)[0]) if self.by_memory else time_of(self.model, candidate)
        key = candidate[:4]
        if value < self.tried.get(key, (INFINITE, None))[0]:
            self.tried[key] = (value, candidate)
        if value < self.value:
            self.value, self.best = value, candidate

    def _enumerate(self, bound: Number, branch: Cuts) -> None:
        """Try all cuts whose bound is below a limit, then push the branch with this limit as its bound.

        The limit rises from call to call, up to the limit of the search (`_limit`). If the search does not
        have a limit yet, the function stops at the first candidate that fits, and pushes the branch with its
        old bound. If none fits, it counts the remaining cuts as not fitting. If the budget ends, it counts
        them as not examined.
        """
        most = self._limit(branch)
        known = most < INFINITE  # whether a candidate that fits is known
        limit = min(most, bound + max(bound / 64, (most - bound) / 4)) if known else INFINITE
        most_steps = STEPS * max(self._left, 1)
        steps = iter(range(most_steps))
        try:
            for value, cuts in branch.cutting.cuts(limit, lambda: self._spend(steps)):
                if value >= branch.done:
                    self._try(branch, cuts)
                if not known and self._limit(branch) < INFINITE:
                    limit = bound
                    break
        except _Exhausted:
            self.lowest = min(self.lowest, bound)
            self._leave("left", branch)
            return
        finally:
            self._left -= (most_steps - length_hint(steps)) // STEPS
        if limit < INFINITE:
            branch.done = max(branch.done, limit if limit > bound else 0)
            self._push(limit, branch)
        else:
            self._leave("memory", branch)

    def _spend(self, steps: Iterator[int]) -> None:
        """Take one of the allowed steps. Raise `_Exhausted` if none is left."""
        if next(steps, None) is None:
            raise _Exhausted

    def _try(self, branch: Cuts, cuts: tuple[int, ...]) -> None:
        """Count one candidate, and estimate its objective if it fits and its bound does not exclude it. Do
        nothing if it was tried before. Raise `_Exhausted` if the budget does not suffice for the estimate.

        The memory and the bound come first, because they cost less time than the estimate.
        """
        if cuts in branch.seen:
            return
        candidate = branch.choice.candidate(cuts)
        bound = self._bound(candidate)
        if not self._fits(candidate):
            self._count(branch, cuts, "memory")
            self._over(bound, branch.choice, candidate)
            return
        if self._is_excluded(bound, branch):
            if not self._fills_table:
                self.lowest = min(self.lowest, bound)
            self._count(branch, cuts, "bound")
            branch.above.add(cuts)
            return
        self._left -= 1
        if self._left < 0:
            raise _Exhausted
        self._count(branch, cuts, None)
        self._improve(candidate)

    def _count(self, branch: Cuts, cuts: tuple[int, ...], why: str | None) -> None:
        """Count cuts as tried: as skipped for the reason `why`, or as estimated if `why` is None."""
        branch.seen.add(cuts)
        branch.left -= 1
        if why is None:
            self.evaluated += 1
        else:
            self.cut[why] += 1

    def _over(self, bound: Number, choice: Choice, candidate: Candidate | None = None) -> None:
        """Remember a candidate that does not fit, with its bound. Without `candidate`, no candidate of the
        choice fits, and the choice's candidate with even cuts represents it. Keep only candidates with the
        lowest bounds.
        """
        self.over.append((bound, candidate or choice.candidate(self._even(choice.layout))))
        if len(self.over) > 10 * TABLE:
            self.over = heapq.nsmallest(TABLE, self.over, key=lambda item: item[0])

    def _found(self, evaluated: int, cut: dict[str, int]) -> Found:
        """Return the result. Its table has up to `TABLE` of the best candidates that fit, and up to `OVER`
        better candidates that do not fit, the best candidate first."""
        assert self.best is not None
        best = estimate(self.model, self.best)
        fitting = heapq.nsmallest(TABLE, self.tried.values(), key=lambda item: item[0])
        over = heapq.nsmallest(
            TABLE, (item for item in self.over if item[0] < self.value), key=lambda item: item[0]
        )
        rows = [self._row(candidate, best) for _, candidate in fitting]
        better = [
            row for row in (self._row(candidate, best) for _, candidate in over) if self._of(row) < self.value
        ]
        rows = sorted(rows + better[:OVER], key=lambda row: (self._of(row), row.reason != ""))
        return Found(self.best, best, self._gap(), tuple(rows), self._size, cut, evaluated, self.space)

    def _gap(self) -> Number:
        """Return the share by which the best candidate exceeds the lowest bound of all others; 0 if it is
        proved to be the best."""
        if self.lowest >= self.value:
            return 0
        return self.value / self.lowest - 1 if self.lowest > 0 else INFINITE

    def _row(self, candidate: Candidate, best: Estimate) -> CandidateRow:
        own = estimate(self.model, candidate)
        return CandidateRow(
            candidate, own, "" if candidate == self.best else reason(self.space, own, best, self.by_memory)
        )

    def _of(self, row: CandidateRow) -> Number:
        """Return the objective of a row's candidate."""
        return max(row.estimate.memory) if self.by_memory else row.estimate.time
