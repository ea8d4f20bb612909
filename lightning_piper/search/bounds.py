"""Lower bounds of time and memory. A search skips only the candidates that these bounds exclude.

A rank cannot begin before its first pass has its inputs. It runs all of its passes one after the other. After
its last pass, earlier stages must still run their backward passes. The same holds for the passes of a rank
from any pass to any later pass. `Rows.between` has the spans from the first pass or the first backward pass, to the
last pass or the last pass that makes gradients of inputs. For each stage, it also has the span from the stage's first
pass to the stage's last pass that makes gradients of inputs. Hence

    time >= head(first) + work of the passes between + tail(last)

- head(F of s): the gather of the first stage's parameters, then the forward passes and messages of the stages
  before s. If the first pass of s waits for a gather, the head is at least this gather.
- head(B of s): the same gather, all forward passes, and the backward passes and messages of the stages after
  s.
- tail(B of s): the backward passes and messages of the stages before s; or the sum of the gradients of s over
  the replicas and over groups of replicas, and the optimizer's update.

`bound_of` computes these bounds for a whole candidate. `Cutting` computes a bound from the blocks of one
stage. This bound holds for every cut of the other blocks, because the work before and after the stage is a
sum over blocks, and each boundary costs at least the smallest message.

The bound of stage s over the blocks i to j grows with j and falls with i, and so do the bytes of its rank. So
`Cutting.reach` finds the possible cuts below a limit from the end of the chain to its beginning. The last
stage must begin at some block or later. Hence the stage before it must also begin at some block or later, and
so on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.estimate import (
    AGAIN,
    AWAY,
    Option,
    Way,
    gathers_of,
    passes_of,
    rows_for,
    saved_bytes,
)
from lightning_piper.search.rows import BI, BW, B, F, Kept, decisive_states, rows_of
from lightning_piper.search.space import Candidate, Layout
from lightning_piper.search.stage_costs import CostModel, Costs, Span
from lightning_piper.simulate.durations import Number

INFINITE = float("inf")


def bound_of(model: CostModel, candidate: Candidate) -> Number:
    """Return a lower bound of a candidate's seconds, in time linear in the stages. See the module's
    docstring."""
    # For each stage, `forward` has the head of F, `backward` the head of B, and `behind` the tail of B
    # without sums and updates.
    rows, costs, levels = rows_for(candidate), model.costs(candidate.layout), candidate.levels
    spans, passes = candidate.spans(costs.blocks), passes_of(costs, candidate)
    back = BI if SEARCHED[candidate.layout.schedule].split else B
    hops = [costs.hop(border, block) for border, block in enumerate(candidate.cuts)]
    forward: list[Number] = []
    for s, gather in enumerate(gathers_of(model, candidate, rows)):
        forward.append(max(gather, forward[-1] + passes[s - 1][F] + hops[s - 1]) if s else gather)
    backward = [forward[-1] + passes[-1][F]]
    for s in range(rows.stages - 2, -1, -1):
        backward.append(backward[-1] + passes[s + 1][back] + hops[s])
    backward.reverse()
    behind: list[Number] = [0]
    for s in range(1, rows.stages):
        behind.append(behind[-1] + hops[s - 1] + passes[s - 1][back])
    most: Number = 0
    for local, pairs in zip(rows.local, rows.between, strict=True):
        update = costs.update([spans[s] for s in local], [levels[s] for s in local])
        for (first, kind), (last, ends), count in pairs:
            tail = behind[last] if ends != BW else 0
            tail = max(tail, update + (costs.reduction(spans[last], levels[last]) if ends != BI else 0))
            work = sum((n * passes[s][k] for s, k, n in count), start=0)
            most = max(most, (forward if kind == F else backward)[first] + work + tail)
    return most


class Cutting:
    """All cuts of the blocks for one layout, with bounds, given the options of each stage.

    If a stage has several options, its bound is the smallest bound of an option with which it fits.

    Attributes:
        layout: The layout of the stages.
        costs: The costs of the layout.
    """

    def __init__(
        self, model: CostModel, layout: Layout, options: Sequence[Sequence[Option]], by_memory: bool
    ) -> None:
        """Compute the terms that the bounds of all cuts share. With `by_memory`, bounds are bytes of a
        device, and otherwise seconds of a step."""
        self.layout, self._options = layout, options
        self.costs: Costs = model.costs(layout)
        self._rows = rows_of(layout.schedule, layout.per_rank, layout.ranks, layout.microbatches)
        self._limit, self._margin, self._by_memory = model.space.memory, 1 + model.space.margin, by_memory
        self._host = model.space.hardware.host_memory
        self._back = BI if SEARCHED[layout.schedule].split else B
        hops = [self.costs.least_hop(border) for border in range(layout.stages - 1)]
        # For each stage, the least seconds of the messages across all boundaries before it.
        self._hops: list[Number] = [0]
        for hop in hops:
            self._hops.append(self._hops[-1] + hop)
        # Arguments of `stage` -> its result.
        self._known: dict[tuple[int, int, int], tuple[Number, bool]] = {}
        gathered = all(level for level, _ in options[0])
        # The first stage has at least the first block, so its gather takes at least as long as the gather of
        # this block.
        self._start = self.costs.ring((0, 1)) if gathered else 0
        self._pairs = [self._pairs_of(s) for s in range(layout.stages)]
        self._states = [self._states_of(s) for s in range(layout.stages)]

    def _pairs_of(self, stage: int) -> list[tuple[tuple[int, int], tuple[int, int], list[tuple[int, int]]]]:
        """Return the spans of the stage's rank (`Between`): first pass, last pass, and (kind, how often) of
        the passes of this stage in the span."""
        rank, found = self._rows.rank[stage], []
        for first, last, passes in self._rows.between[rank]:
            if not {first[0], last[0]} & {stage, self._rows.local[rank][0]}:
                continue  # the span of another stage says less about this one
            count = [0, 0, 0, 0]
            for s, kind, n in passes:
                if s == stage:
                    count[kind] = n
            found.append((first, last, [(kind, n) for kind, n in enumerate(count) if n]))
        return found

    def _states_of(self, stage: int) -> list[tuple[int, Kept]]:
        """Return the memory states of the stage's rank (`Rows.kept`), with the values of this stage only."""
        rank = self._rows.rank[stage]
        index = self._rows.local[rank].index(stage)
        own = [(runs if runs == stage else -1, (state[index],)) for runs, state in self._rows.kept[rank]]
        return decisive_states(own)

    def stage(self, s: int, i: int, j: int) -> tuple[Number, bool]:
        """Return a lower bound of the objective if stage s has the blocks from i to j (exclusive), and
        whether the stage can fit into the memory."""
        found = self._known.get((s, i, j))
        if found is None:
            found = self._known[s, i, j] = self._stage(s, i, j)
        return found

    def _stage(self, s: int, i: int, j: int) -> tuple[Number, bool]:
        """Do the work of `stage`: return the least bound over the options that fit into the memory, and True.
        If no option fits, return the least bound over all options, and False."""
        values = sorted(
            (
                self._bytes(s, (i, j), *option)[0] if self._by_memory else self._time(s, i, j, *option),
                option,
            )
            for option in self._options[s]
        )
        for value, option in values:
            memory, host = self._bytes(s, (i, j), *option)
            if memory <= self._limit and host <= self._host:
                return value, True
        return values[0][0], False

    def _time(self, s: int, i: int, j: int, level: int, way: Way) -> Number:
        """Return a lower bound of the step's time if stage s has the blocks from i to j.

        A bound belongs to a span of work of the stage's rank (`Between`). It is the sum of a head (the time
        before the span), the stage's passes in the span, and a tail (the time after the span). Each span has
        two bounds, and the result is the largest of all bounds. In one bound, heads and tails depend on the
        stage's position, but passes count only with their work. In the other bound, passes count with gathers
        and transfers to the host, but heads and tails are valid for any position. Each bound alone grows with
        the blocks of the stage.
        """
        hops = self._hops
        plain = self.costs.passes((i, j), 0, way == AGAIN, False)
        passes = (
            plain
            if way != AWAY and level < 3
            else self.costs.passes((i, j), level, way == AGAIN, way == AWAY)
        )
        reduction = self.costs.reduction((i, j), level) if self.layout.replicas > 1 else 0
        update = self.costs.update(((i, j),), (level,))
        start = self._start if s else self.costs.ring((i, j)) if level else 0
        before, behind = self._backward(0, i) + hops[s], self._backward(j, self.costs.blocks)
        most: Number = 0
        for (first, kind), (last, ends), count in self._pairs[s]:
            head, tail = start + hops[first], 0 if ends == BW else hops[last]
            if kind != F:
                head = start + self.costs.forward[-1] + hops[-1] + hops[-1] - hops[first]
            summed = update + (reduction if last == s and ends != BI else 0)
            if passes is not plain:
                most = max(most, head + sum([n * passes[k] for k, n in count]) + max(tail, summed))
            if first == s:
                head += self.costs.forward[i] if kind == F else behind
            if last == s and ends != BW:
                tail = before
            most = max(most, head + sum([n * plain[k] for k, n in count]) + max(tail, summed))
        return most

    def _backward(self, i: int, j: int) -> Number:
        """Return the seconds of the backward passes of the blocks i to j (exclusive) for which earlier stages
        wait."""
        found = self.costs.inputs[j] - self.costs.inputs[i]
        return found if self._back == BI else found + self.costs.weights[j] - self.costs.weights[i]

    def _bytes(self, s: int, span: Span, level: int, way: Way) -> tuple[Number, Number]:
        """Return lower bounds of the bytes of the rank of stage s, and of its host."""
        saved, host = saved_bytes(self.costs, [(s, span, way)], self._states[s], least=True)
        most = max(
            saved + (2 * self.costs.least_output if self.layout.ranks > 1 else 0),
            self.costs.updating((span,), (level,)),
        )
        return (self.costs.static((span,), (level,)) + most) * self._margin, host

    def reach(self, limit: Number) -> list[int] | None:
        """Return for each s the first block from which the stages s, s + 1, ... can cover all later blocks.
        The last entry of the list is the number of blocks.

        Each stage must fit, with a bound below the limit. Return None if the stages cannot cover all blocks,
        or if the bound from the mean work of the ranks is not below the limit. Stages may be empty here. So
        if the stages can begin at some block, they can also begin at any later block.
        """
        stages, blocks = self.layout.stages, self.costs.blocks
        low = [blocks] * (stages + 1)
        for s in range(stages - 1, -1, -1):
            starts = range(s, 1 if s == 0 else blocks - (stages - s) + 1)
            k = bisect_left(
                starts,
                True,
                key=lambda i, s=s: i >= low[s + 1] or self._below(s, i, low[s + 1], limit),  # type: ignore[misc]
            )
            if k == len(starts):
                return None
            low[s] = starts[k]
        return low if self._average() < limit else None

    def _below(self, s: int, i: int, j: int, limit: Number) -> bool:
        """Return whether stage s can fit with the blocks i to j (exclusive), and has a bound below the
        limit."""
        value, fits = self.stage(s, i, j)
        return fits and value < limit

    def _average(self) -> Number:
        """Return a lower bound of time: the mean work of the ranks. The busiest rank has at least the mean.

        If all stages have level 3, passes together take at least as long as the gather of all parameters. For
        the memory objective the bound is 0.
        """
        if self._by_memory:
            return 0
        f, bi, bw = self.costs.forward[-1], self.costs.inputs[-1], self.costs.weights[-1]
        shape = SEARCHED[self.layout.schedule]
        parts = (f, bi, bw) if shape.split and not shape.whole_too else (f, bi + bw)
        gather = (
            self.costs.ring((0, self.costs.blocks))
            if all(level == 3 for own in self._options for level, _ in own)
            else 0
        )
        return self.layout.microbatches * sum(max(part, gather) for part in parts) / self.layout.ranks

    def least(self, low: Number, high: Number) -> tuple[Number, Number]:
        """Return two limits: no cut has a bound below the first, and some cuts may be below the second.

        Both are at least `low`. Both are `high` if no cut has a bound below `high`.

        Args:
            low: A limit below which no cut has a bound.
            high: The limit of the search. If it is infinite, some cut must fit.
        """
        if self.reach(high) is None:
            return high, high
        if high == INFINITE:
            high = 2 * low if low else 1
            while self.reach(high) is None:
                low, high = high, 2 * high
        for _ in range(10):
            middle = (low + high) / 2
            if self.reach(middle) is None:
                low = middle
            else:
                high = middle
        return low, high

    def cuts(self, limit: Number, spend: Callable[[], None]) -> Iterator[tuple[Number, tuple[int, ...]]]:
        """Yield all cuts whose bound is below the limit, each with its bound.

        Args:
            limit: The limit of the bounds.
            spend: Called for each stage considered; its exception stops the enumeration.
        """
        low = self.reach(limit)
        if low is None:
            return
        # This is a depth-first search. `ends` has the chosen ends of the stages before stage s. `bounds` has
        # a bound for the first n stages, for each n up to s. `at` has the next end to try for each stage up
        # to s.
        stages, blocks = self.layout.stages, self.costs.blocks
        ends: list[int] = []
        bounds: list[Number] = [0]
        at = [max(1, low[1])]
        while at:
            spend()
            s, j, i = len(at) - 1, at[-1], ends[-1] if ends else 0
            value, fits = self.stage(s, i, j) if j <= blocks - (stages - 1 - s) else (limit, False)
            if not fits or value >= limit:  # a larger j cannot fit or have a smaller bound
                at.pop()
                if ends:
                    ends.pop()
                    bounds.pop()
                continue
            at[-1] = j + 1
            value = max(bounds[-1], value, self._together(s, j, ends))
            if value >= limit:
                continue
            if s == stages - 1:
                yield value, tuple(ends)
                continue
            ends.append(j)
            bounds.append(value)
            at.append(max(j + 1, low[s + 2]))

    def _together(self, s: int, j: int, ends: Sequence[int]) -> Number:
        """Return a lower bound of the objective from those stages of the rank of stage s that are not after
        s.

        The bound is infinite if these stages do not fit together, and 0 if s is the only one.

        Args:
            s: The stage.
            j: The end of its blocks.
            ends: The ends of the blocks of all stages before it.
        """
        rank = self._rows.rank[s]
        local = [t for t in self._rows.local[rank] if t <= s]
        if len(local) == 1:
            return 0
        edges = [0, *ends, j]
        spans = [(edges[t], edges[t + 1]) for t in local]
        saved: Number = 0
        host: Number = 0
        options = [self._options[t] for t in local]
        # Saved values count only if the way of each stage is known. Otherwise 0 is a valid bound.
        if all(len({way for _, way in own}) == 1 for own in options):
            indices = [self._rows.local[rank].index(t) for t in local]
            states = [
                (runs if runs in local else -1, tuple(state[p] for p in indices))
                for runs, state in self._rows.kept[rank]
            ]
            stages = [(t, span, own[0][1]) for t, span, own in zip(local, spans, options, strict=True)]
            saved, host = saved_bytes(self.costs, stages, states, least=True)
        levels = [max(level for level, _ in own) for own in options]
        lowest = any(len({level for level, _ in own}) > 1 for own in options)
        most = max(saved + 2 * self.costs.least_output, self.costs.updating(spans, levels))
        memory = (self.costs.static(spans, levels, lowest) + most) * self._margin
        if memory > self._limit or host > self._host:
            return INFINITE
        if self._by_memory:
            return memory
        work: Number = 0
        for own, span in zip(options, spans, strict=True):
            work += min(self._work(span, level, way) for level, way in own)
        return self.costs.forward[spans[0][0]] + self.layout.microbatches * work

    def _work(self, span: Span, level: int, way: Way) -> Number:
        """Return a lower bound of the seconds of all passes of a stage on one microbatch."""
        f, b, bi, bw = self.costs.passes(span, level, way == AGAIN, way == AWAY)
        return f + (b if self._back == B else min(b, bi + bw))
