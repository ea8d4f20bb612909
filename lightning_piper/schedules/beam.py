"""A search through orders of passes that keeps the most promising beginnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_piper.schedules.listing import Chain, Step, World
from lightning_piper.schedules.timing import Number

_Trail = tuple[Any, Step] | None  # the steps done, the last one first
_Entry = tuple[tuple[Number, Number], Number, World, _Trail]  # bound and idle time, begin of the last step, what is done, and how


class _Bound:
    """How soon a step could be over, from what has been done: no schedule is faster."""

    def __init__(self, chain: Chain) -> None:
        passes, stages = chain.times.passes, len(chain.ranks)
        self._chain = chain
        self.forward = [p["F"] for p in passes]
        self._through = [passes[0]["B"] if s == 0 else min(passes[s]["BI"], passes[s]["B"]) for s in range(stages)]
        self.both = [passes[0]["B"] if s == 0 else min(p["BI"] + p["BW"], p["B"]) for s, p in enumerate(passes)]
        self.hop = [chain.times.transfer[s] if chain.ranks[s] != chain.ranks[s + 1] else 0 for s in range(stages - 1)]
        self._back: list[Number] = [0] * stages  # from the end of the backward pass of a stage to the end of that of the first one
        for s in range(1, stages):
            self._back[s] = self._back[s - 1] + self._through[s - 1] + self.hop[s - 1]
        self._turn: list[Number] = [0] * stages  # from the end of F of a stage to the begin of its backward pass
        for s in reversed(range(stages - 1)):
            self._turn[s] = 2 * self.hop[s] + self.forward[s + 1] + self._turn[s + 1] + self._through[s + 1]

    def of(self, world: World, now: Number) -> tuple[Number, Number]:
        """The bound, if nothing begins before `now` any more; and when all ranks could be done, added up: less, if less idled."""
        chain, m = self._chain, self._chain.microbatches
        worst: Number = 0
        total: Number = 0
        for rank, own in enumerate(chain.local):
            clock = work = max(world.clock[rank], now)
            for s in own:
                f, b, w = m - world.forward[s], m - world.backward[s], world.backward[s] - world.weights[s]
                work += f * self.forward[s] + b * self.both[s] + w * chain.times.passes[s]["BW"]
                if b:
                    end = clock + f * self.forward[s] + b * self._through[s] + self._back[s]
                    last = clock + f * self.forward[s] + self._turn[s] + self._through[s] + self._back[s] if f else 0
                    worst = max(worst, end, last)
            worst = max(worst, work)
            total += work
        return worst, total


def shortest(chain: Chain) -> Number:
    """No schedule ends before: each rank has its work to do, once the first microbatch has come to it."""
    bound = _Bound(chain)
    way: list[Number] = [0]  # to each stage
    for forward, hop in zip(bound.forward, bound.hop, strict=False):
        way.append(way[-1] + forward + hop)
    work = [way[own[0]] + chain.microbatches * sum(bound.forward[s] + bound.both[s] for s in own) for own in chain.local]
    return max(*work, bound.of(World(chain), 0)[0])


def searched(chain: Chain, width: int, best: Number) -> list[Step] | None:
    """Steps that end before `best`, in an order in which they can run, if the search finds any.

    Of all orders that have done equally much, the `width` most promising ones go on: those that could be over first, and of these,
    those that have idled least. Steps are chosen in the order in which they begin, so no order is met twice.
    """
    bound = _Bound(chain)
    layers: list[dict[object, _Entry]] = [{} for _ in range(chain.actions + 1)]
    layers[0][None] = ((0, 0), 0, World(chain), None)
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


def _steps(chain: Chain, world: World, now: Number) -> Iterator[tuple[Number, Step]]:
    """What could be done next, beginning no earlier than the last step did."""
    for stage in range(len(chain.ranks)):
        for kind in ("F", "B") if stage == 0 else ("F", "BI", "B", "BW"):
            start = world.start(stage, kind)
            if start is not None and start >= now and (kind != "F" or world.fits(stage)):
                yield start, (stage, kind)
