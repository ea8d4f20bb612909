"""Lower bounds of the time and memory of layouts, which hold for every cut of the blocks.

They need only sums over the blocks of the model. So a search can compute them for each layout, before it
considers the stages of a layout (`bounds`, `joint_bounds`).
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import NamedTuple

from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.links import ring
from lightning_piper.search.space import Family, Layout
from lightning_piper.search.stage_costs import CostModel, samples_of
from lightning_piper.simulate.durations import Number


class _Sums(NamedTuple):
    """Lower bounds of seconds of all blocks on one microbatch. Earlier stages wait for the whole B, or for BI
    if backward passes are split.

    Attributes:
        work: The sum of all passes.
        path: The sum of the forward passes and of the backward passes for which earlier stages wait.
        longest: The longest backward pass of one block for which earlier stages wait.
    """

    work: Number
    path: Number
    longest: Number


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
        backward = inputs if split else [b + w for b, w in zip(inputs, weights, strict=True)]
        return _Sums(sum(forward) + sum(inputs) + sum(weights), sum(forward) + sum(backward), max(backward))

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

    def _busiest_of(self, samples: int, tensor: int, ranks: int) -> Number:
        """Return a lower bound of the seconds of the busiest rank on one microbatch.

        A block is on one rank as a whole. So of the k n + 1 longest blocks, one of n ranks has at least k +
        1.
        """
        works = sorted((sum(work) for work in self._works(samples, tensor)), reverse=True)
        return max(sum(works[n - 1 - (n - 1) // ranks : n]) for n in range(1, len(works) + 1, ranks))

    def time(self, layout: Layout) -> Number:
        """Return a lower bound of the seconds of a step: the largest of several bounds.

        One bound is the work of the busiest rank. Another bound is the path of one microbatch, plus the
        backward passes of all other microbatches through the longest block. In a chain with whole backward
        passes and one stage on each rank there is another bound, from

            time >= w(0) + ... + w(r - 1) + m w(r)

        for every rank r of n, with work w on each of m microbatches. So W(r) = w(0) + ... + w(r) is at most
        (1 - 1/m) W(r - 1) + time/m, and the total work is at most (1 - (1 - 1/m)^n) time.
        """
        samples = samples_of(self._space.workload, layout)
        split, single = SEARCHED[layout.schedule].split, layout.per_rank == 1
        return self._times(samples, layout.microbatches, layout.tensor, layout.ranks, split, single)

    def _time_of(
        self, samples: int, microbatches: int, tensor: int, ranks: int, split: bool, single: bool
    ) -> Number:
        m, sums, busiest = (
            microbatches,
            self._sums(samples, tensor, split),
            self._busiest(samples, tensor, ranks),
        )
        found: Number = max(m * sums.work / ranks, m * busiest, sums.path + (m - 1) * sums.longest)
        if not split and single:
            left = Fraction(m - 1, m) ** ranks
            found = max(
                found, sums.work / (1 - left if isinstance(sums.work, Fraction | int) else float(1 - left))
            )
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
        # The bound of split backward passes is the lowest, and groups of replicas only need more bytes.
        (name, per_rank), (routed, inside, _) = self._fastest(family.schedules), family.numberings[0]
        ranks, replicas, tensor, microbatches = family[:4]
        layout = Layout(name, per_rank, ranks, replicas, tensor, routed, microbatches, inside)
        divided = {routed for routed, _, _ in family.numberings}
        return self.time(layout), min(self.memory(layout._replace(routed=routed)) for routed in divided)

    @staticmethod
    @functools.cache
    def _fastest(schedules: tuple[tuple[str, int], ...]) -> tuple[str, int]:
        """Return the schedule with the lowest bound of time, with its stages on each rank."""
        return min(schedules, key=lambda own: (not SEARCHED[own[0]].split, own[1] == 1))
