"""A beam search over orders of passes, which keeps the most promising partial schedules. `fitted` runs it
after list scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_piper.schedules.list_scheduling import Chain, PartialSchedule, Step
from lightning_piper.schedules.timing import Number

_Trail = tuple[Any, Step] | None  # the steps so far: (earlier steps, latest step)
# (result of `_Bound.of`, start of the latest step, state after it, steps so far)
_Entry = tuple[tuple[Number, Number], Number, PartialSchedule, _Trail]


class _Bound:
    """A lower bound on the end of the step, given the passes done so far. All times have the unit of
    `chain.times`."""

    def __init__(self, chain: Chain) -> None:
        """Compute the shortest times of each stage, from which the bound follows."""
        passes, stages = chain.times.passes, len(chain.ranks)
        self._chain = chain
        self.forward = [p["F"] for p in passes]
        # The least time from the start of a stage's backward pass to its output gradient.
        self._through = [
            passes[0]["B"] if s == 0 else min(passes[s]["BI"], passes[s]["B"]) for s in range(stages)
        ]
        # The least time of the whole backward work of a stage for one microbatch.
        self.both = [
            passes[0]["B"] if s == 0 else min(p["BI"] + p["BW"], p["B"]) for s, p in enumerate(passes)
        ]
        # The time of a message between a stage and the next one.
        self.hop = [
            chain.times.transfer[s] if chain.ranks[s] != chain.ranks[s + 1] else 0 for s in range(stages - 1)
        ]
        # The least time from the end of a stage's backward pass to the end of the first stage's backward pass
        # for the same microbatch.
        self._back: list[Number] = [0] * stages
        for s in range(1, stages):
            self._back[s] = self._back[s - 1] + self._through[s - 1] + self.hop[s - 1]
        # The least time from the end of a stage's F to the start of its backward pass for the same
        # microbatch.
        self._turn: list[Number] = [0] * stages
        for s in reversed(range(stages - 1)):
            self._turn[s] = 2 * self.hop[s] + self.forward[s + 1] + self._turn[s + 1] + self._through[s + 1]

    def of(self, world: PartialSchedule, now: Number) -> tuple[Number, Number]:
        """Return a lower bound of the step's end, and a sum over ranks: when each rank would end if it never
        waited. Both assume that no further pass starts before `now`.

        Of two states with the same bound, the state with the smaller sum has less idle time.
        """
        chain, m = self._chain, self._chain.microbatches
        worst: Number = 0
        total: Number = 0
        for rank, own in enumerate(chain.local):
            clock = work = max(world.clock[rank], now)
            for s in own:
                # f, b and w are the numbers of F, B or BI, and BW of the stage that have not run.
                f, b, w = m - world.forward[s], m - world.backward[s], world.backward[s] - world.weights[s]
                work += f * self.forward[s] + b * self.both[s] + w * chain.times.passes[s]["BW"]
                if b:
                    end = clock + f * self.forward[s] + b * self._through[s] + self._back[s]
                    last = (
                        clock + f * self.forward[s] + self._turn[s] + self._through[s] + self._back[s]
                        if f
                        else 0
                    )
                    worst = max(worst, end, last)
            worst = max(worst, work)
            total += work
        return worst, total


def shortest(chain: Chain) -> Number:
    """Return a lower bound on the end of any schedule, in the unit of `chain.times`.

    The bound follows from the fact that each rank does all of its work after the first microbatch has reached
    the rank.
    """
    bound = _Bound(chain)
    way: list[Number] = [0]  # stage -> time at which the first microbatch can reach it
    for forward, hop in zip(bound.forward, bound.hop, strict=False):
        way.append(way[-1] + forward + hop)
    work = [
        way[own[0]] + chain.microbatches * sum(bound.forward[s] + bound.both[s] for s in own)
        for own in chain.local
    ]
    return max(*work, bound.of(PartialSchedule(chain), 0)[0])


def beam_steps(chain: Chain, width: int, best: Number) -> list[Step] | None:
    """Return steps in a feasible order that end before the time `best`, in the unit of `chain.times`. None if
    the search does not find such steps.

    Among partial schedules with the same number of passes done (a B counts as two), the search keeps the
    `width` schedules with the smallest bound. Among equal bounds it prefers the least idle time. A step never
    starts before the step that was chosen before it, so the search never visits an order twice.
    """
    bound = _Bound(chain)
    # For each number of passes done, `PartialSchedule.key` -> the entry whose latest step starts first.
    layers: list[dict[object, _Entry]] = [{} for _ in range(chain.actions + 1)]
    layers[0][None] = ((0, 0), 0, PartialSchedule(chain), None)
    found: _Trail = None
    for done, layer in enumerate(layers):
        ranked = sorted(layer.values(), key=lambda entry: entry[:2])
        layer.clear()
        for (worst, _), now, world, trail in ranked[:width]:
            if worst >= best:
                break
            if done == chain.actions:
                found, best = trail, worst
                break
            for start, step in _steps(chain, world, now):
                other = world.copy()
                other.run(*step)
                score = bound.of(other, start)
                if score[0] < best:
                    into, key = layers[done + 1 + (step[1] == "B")], other.key()
                    if key not in into or start < into[key][1]:
                        into[key] = (score, start, other, (trail, step))
    steps: list[Step] = []
    while found is not None:
        steps.append(found[1])
        found = found[0]
    return steps[::-1] or None


def _steps(chain: Chain, world: PartialSchedule, now: Number) -> Iterator[tuple[Number, Step]]:
    """Yield (start, step) for each step that could come next. `now` is the start of the previous step: no
    step starts before it."""
    for stage in range(len(chain.ranks)):
        for kind in ("F", "B") if stage == 0 else ("F", "BI", "B", "BW"):
            start = world.start(stage, kind)
            if start is not None and start >= now and (kind != "F" or world.fits(stage)):
                yield start, (stage, kind)
