"""Lower bounds of the time and memory of layouts, which hold for every cut of the blocks.

They need only sums over the blocks of the model. So a search can compute them for each layout, before it
considers the stages of a layout (`bounds`, `joint_bounds`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.links import ring
from lightning_piper.search.space import Family, Layout
from lightning_piper.search.stage_costs import CostModel, samples_of
from lightning_piper.simulate.durations import Number

INFINITE = float("inf")


class _Sums(NamedTuple):
    """Lower bounds of seconds of the blocks on one microbatch. Earlier stages wait for the whole B, or for BI if
    backward passes are split.

    Attributes:
        works: The sum of all passes of each block, the largest first.
        ways: For each n, the least seconds of n blocks for which a rank waits: of the forward passes before its own
            passes and, if backward passes are whole, of the backward passes after these.
        path: The sum of the forward passes and of the backward passes for which earlier stages wait.
        longest: The longest backward pass of one block for which earlier stages wait.
        share: The share of a block's work that delays later ranks: the median over the blocks.
        shared: The sum of the works. The work of a block counts as far as at least this share of it delays later ranks.
    """

    works: Sequence[Number]
    ways: Sequence[Number]
    path: Number
    longest: Number
    share: Number
    shared: Number


class Coarse:
    """A source of lower bounds of time and memory for the layouts of a model's space."""

    def __init__(self, model: CostModel) -> None:
        self._model, self._space = model, model.space
        self._works = functools.cache(self._works_of)
        self._sums = functools.cache(self._sums_of)
        self._busiest = functools.cache(self._busiest_of)
        # Many layouts differ only in numbers that do not matter for these.
        self._times = functools.cache(self._time_of)
        self._memories = functools.cache(self._memory_of)

    def _sums_of(self, samples: int, tensor: int, split: bool) -> _Sums:
        forward, inputs, weights = map(list, zip(*self._works(samples, tensor), strict=True))
        backward = inputs if split else list(map(add, inputs, weights))
        works = [sum(work) for work in self._works(samples, tensor)]
        heads, tails = (list(accumulate(sorted(column), initial=0)) for column in (forward, backward))
        delays = forward if split else works
        shares = sorted(delay / work for delay, work in zip(delays, works, strict=True) if work)
        share = shares[len(shares) // 2] if shares else 0
        return _Sums(
            sorted(works, reverse=True),
            heads if split else list(map(add, heads, tails)),
            sum(forward) + sum(backward),
            max(backward),
            share,
            sum(min(work, delay / share) for work, delay in zip(works, delays, strict=True)) if share else 0,
        )

    def _works_of(self, samples: int, tensor: int) -> list[tuple[Number, Number, Number]]:
        """Return, for each block, lower bounds of the seconds of F, BI and BW on one microbatch. They include
        the sums along the tensor axis."""
        works = [work for work in self._model.works(samples, tensor) if work is not None]
        links = [link for _, link in self._space.hardware.links]
        moved = [2 * min(ring(link, work.exchanged, tensor) for link in links) for work in works]
        return [
            (x.forward + m, x.backward_input + m, x.backward_weights)
            for x, m in zip(works, moved, strict=True)
        ]

    def time(self, layout: Layout) -> Number:
        """Return a lower bound of the seconds of a step: the largest of several bounds.

        One bound is the mean work of the ranks, with the passes for which they wait. A rank waits for a block of each
        rank before it (`_Sums.ways`). Another bound is the work of the busiest rank (`_busiest_of`). A third one is the
        path of one microbatch, plus the backward passes of all other microbatches through the longest block. In a chain with
        one stage on each rank there is another bound, from

            time >= a (w(0) + ... + w(r - 1)) + m w(r)

        for every rank r of n, with work w on each of m microbatches, of which the share a delays later ranks. So W(r) =
        w(0) + ... + w(r) is at most (1 - a/m) W(r - 1) + time/m, and a times the total work is at most
        (1 - (1 - a/m)^n) time.
        """
        samples = samples_of(self._space.workload, layout)
        split, single = SEARCHED[layout.schedule].split, layout.per_rank == 1
        return self._times(samples, layout.microbatches, layout.tensor, layout.ranks, split, single)

    def _time_of(
        self, samples: int, microbatches: int, tensor: int, ranks: int, split: bool, single: bool
    ) -> Number:
        m, sums = microbatches, self._sums(samples, tensor, split)
        found: Number = max(
            (m * sum(sums.works) + sum(sums.ways[:ranks])) / ranks,
            max(min(m * x, m * y + z) for x, y, z in self._busiest(samples, tensor, ranks, split)),
            sums.path + (m - 1) * sums.longest,
        )
        if single and sums.share:
            left = (1 - sums.share / m) ** ranks
            found = max(found, sums.share * sums.shared / (1 - left))
        return found

    def _busiest_of(
        self, samples: int, tensor: int, ranks: int, split: bool
    ) -> list[tuple[Number, Number, Number]]:
        """Return terms of lower bounds of the seconds of the busiest rank. With (x, y, z), the bound is the smaller one
        of m x and m y + z for m microbatches.

        A block is on one rank as a whole. So of the k n + q longest blocks, one of n ranks has k + 2, or q ranks have
        k + 1. Of q ranks, one waits for q - 1 others.
        """
        sums = self._sums(samples, tensor, split)
        works, found = sums.works, []
        for number in range(1, len(works) + 1):
            if number < len(works) and works[number] == works[number - 1] and number % ranks:
                continue  # the next number seldom gives a lower bound
            k, q = divmod(number - 1, ranks)
            least = sum(works[number - k - 1 : number])
            more = least + works[number - k - 2] if number > k + 1 else INFINITE
            found.append((more, least, sums.ways[q]))
        return found

    def memory(self, layout: Layout) -> Number:
        """Return a lower bound of the bytes of the fullest device: the mean over the ranks of the bytes of
        parameters, gradients and optimizer states. All stages have the highest ZeRO level that the space
        allows. Activations do not count."""
        level = max(self._space.levels) if layout.replicas > 1 else 0
        return self._memories(layout.tensor, layout.routed, layout.shard_size, layout.ranks, level)

    def _memory_of(self, tensor: int, routed: int, shard_size: int, ranks: int, level: int) -> Number:
        params, states = self._model.params(tensor, routed), self._space.workload.states
        every = ((0, len(self._space.workload.blocks)),)

        def nbytes(shared: bool, trained: bool = True) -> int:
            rest, of_experts = params.of(every, trained=trained)
            return rest // shard_size + of_experts // (shard_size // routed) if shared else rest + of_experts

        parts = nbytes(level == 3, trained=False), nbytes(level > 1), states * nbytes(level > 0)
        return sum(parts) * (1 + self._space.margin) / ranks

    def least_of(self, family: Family) -> tuple[Number, Number]:
        """Return a lower bound of the seconds, and one of the bytes, of all layouts of a family."""
        # Groups of replicas only need more bytes.
        routed, inside, _ = family.numberings[0]
        ranks, replicas, tensor, microbatches = family[:4]
        layouts = [
            Layout(name, per_rank, ranks, replicas, tensor, routed, microbatches, inside)
            for name, per_rank in self._fastest(family.schedules)
        ]
        divided = {routed for routed, _, _ in family.numberings}
        least = min(self.memory(layouts[0]._replace(routed=routed)) for routed in divided)
        return min(map(self.time, layouts)), least

    @staticmethod
    @functools.cache
    def _fastest(schedules: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
        """Return schedules, with their stages on each rank, one of which has the lowest bound of time."""
        kinds = {(SEARCHED[name].split, per_rank > 1): (name, per_rank) for name, per_rank in schedules}
        return [kinds[True, True]] if (True, True) in kinds else list(kinds.values())
