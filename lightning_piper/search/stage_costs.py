"""The costs of stages under a layout. Prefix sums give the costs of any run of blocks in constant time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from lightning_piper.errors import SearchError
from lightning_piper.runtime.process import MOST as LENT
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.costs.workload import Block, Work, Workload
from lightning_piper.search.links import Groups, Links, LinkTable, message, ring
from lightning_piper.search.rows import rows_of
from lightning_piper.search.space import Layout, Space
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Collectives
from lightning_piper.simulate.network import Link

Span = tuple[int, int]  # the blocks of a stage: the first, and the end (exclusive)


def _held(block: Block, tensor: int, routed: int) -> tuple[Number, Number]:
    """Return two shares of the bytes of all parameters of a block: the bytes that one device holds in
    parameters outside of experts, and in parameters of experts."""
    found = [0, 0]
    for name, nbytes in block.params.items():
        is_routed = name in block.experts
        found[is_routed] += nbytes // (
            (tensor if name in block.divided else 1) * (routed if is_routed else 1)
        )
    whole = sum(block.params.values()) or 1
    return Fraction(found[0], whole), Fraction(found[1], whole)


def _part(seconds: Number, share: Number) -> Number:
    """Return `seconds * share`, or the int 0 if one of the two is 0."""
    return seconds * share if seconds and share else 0


class Tied(NamedTuple):
    """A parameter that several blocks use: its bytes on one device, whether it belongs to experts, whether it
    gets gradients, and these blocks."""

    nbytes: int
    is_routed: bool
    trains: bool
    blocks: tuple[int, ...]


class Params:
    """A table of the bytes of parameters on one device. A tied parameter counts once on each rank.

    Attributes:
        tied: Parameters that several blocks use.
        block_bytes, trained_bytes: For each block, bytes of all of its parameters, and of its trained
            parameters.
        untied: Prefix sums of the bytes of parameters that only one block uses: a list for parameters outside of
            experts, a list for parameters of experts, and the same two lists for trained parameters only.
        largest_update: For each block, bytes of its largest trained parameter.
        packed: Seconds to copy the gradients of each block into a bucket.
        packed_one_microbatch: Like `packed` with one microbatch: without gradients that the pass
            writes into the bucket directly.
        added: Seconds to add the gradients of each block to the sum from earlier microbatches.
        updated: Prefix sums of the optimizer's seconds: a list for parameters outside of experts, and a list
            for parameters of experts.
        in_parts: Like `updated`, if the optimizer updates shards: the seconds of all shards together.
    """

    def __init__(self, workload: Workload, tensor: int, routed: int) -> None:
        """Make the table for `tensor` devices along the tensor axis, and `routed` replicas that divide the
        experts' parameters."""
        users: dict[str, list[int]] = {}  # parameter -> the blocks that use it
        for k, block in enumerate(workload.blocks):
            for name in block.params:
                users.setdefault(name, []).append(k)
        # For each block, the bytes of parameters that no other block uses: outside of experts, of experts;
        # then only trained parameters, outside of experts, of experts.
        untied = [[0, 0, 0, 0] for _ in workload.blocks]
        self.block_bytes, self.trained_bytes, self.largest_update = (
            [0] * len(workload.blocks) for _ in range(3)
        )
        self.tied: list[Tied] = []
        for name, blocks in users.items():
            block = workload.blocks[blocks[0]]
            is_routed, trains = name in block.experts, name not in block.frozen
            parts = (tensor if name in block.divided else 1) * (routed if is_routed else 1)
            nbytes = -(-block.params[name] // parts)
            for k in blocks:
                self.block_bytes[k] += nbytes
                self.trained_bytes[k] += nbytes * trains
                self.largest_update[k] = max(self.largest_update[k], nbytes * trains)
            if len(blocks) > 1:
                self.tied.append(Tied(nbytes, is_routed, trains, tuple(blocks)))
            else:
                untied[blocks[0]][is_routed] += nbytes
                untied[blocks[0]][2 + is_routed] += nbytes * trains
        self.untied = [[0, *accumulate(own[k] for own in untied)] for k in range(4)]
        held = [(block, _held(block, tensor, routed)) for block in workload.blocks]
        self.packed = [_part(block.packed, sum(share)) for block, share in held]
        self.packed_one_microbatch = [_part(block.packed_one_microbatch, sum(share)) for block, share in held]
        self.added = [_part(block.added, sum(share)) for block, share in held]
        self.updated = [
            [0, *accumulate(_part(block.updated, share[k]) for block, share in held)] for k in (0, 1)
        ]
        self.in_parts = [
            [0, *accumulate(_part(block.updated_in_parts, share[k]) for block, share in held)] for k in (0, 1)
        ]

    def of(self, spans: Sequence[Span], tied: bool = True, trained: bool = False) -> tuple[int, int]:
        """Return the bytes of parameters on a rank with these stages: outside of experts, and of experts.

        Args:
            spans: The blocks of each stage of the rank.
            tied: Whether to include parameters that several blocks use.
            trained: Count only parameters that get gradients.
        """
        found = [
            sum(own[j] - own[i] for i, j in spans)
            for own in (self.untied[2:] if trained else self.untied[:2])
        ]
        for each in self.tied if tied else ():
            if (each.trains or not trained) and any(i <= k < j for k in each.blocks for i, j in spans):
                found[each.is_routed] += each.nbytes
        return found[0], found[1]


class ReplicaCollective(NamedTuple):
    """A collective of the replicas on the parameters of a stage, or on their gradients.

    Attributes:
        groups: The groups of replicas.
        passes: The number of passes around their rings.
        parts: The collective has 1/`parts` of the bytes.
        measured: The measured time of the whole collective; None to compute it from the rings.
    """

    groups: Groups
    passes: int
    parts: int = 1
    measured: Link | None = None

    def time(self, nbytes: Number) -> Number:
        """Return the seconds of the collective on parameters of `nbytes` bytes."""
        if self.measured is None or self.groups.members == 1 or not nbytes:
            return self.passes * self.groups.time(nbytes, self.parts)
        return message(self.measured, nbytes)

    @property
    def slope(self) -> Number:
        """The seconds per byte, without the part of the time that does not depend on the bytes."""
        if self.measured is None or self.groups.members == 1:
            return self.passes * self.groups.slope / self.parts
        return 0 if self.measured.bandwidth is None else 1 / self.measured.bandwidth


# A collective of parameters outside of experts, and one of experts.
Pair = tuple[ReplicaCollective, ReplicaCollective]


class Costs:
    """A table of the costs of any stage of one layout. Each cost grows with the blocks of the stage.

    Attributes:
        layout: The layout of the stages.
        links: The links between its devices.
        blocks: Number of blocks.
        params: Bytes of parameters on one device.
        host: The link between a device and its host's memory.
        states: Bytes of optimizer state for each byte of trained parameters.
        output: Bytes of the activations that each block outputs.
        least_output: The smallest number in `output`.
        forward, inputs, weights: Prefix sums over the blocks of the seconds of F, BI and BW.
        saved, kept: Prefix sums of the bytes that F saves, and that are kept for BW.
    """

    def __init__(
        self, space: Space, layout: Layout, params: Params, links: Links, works: Sequence[Work | None]
    ) -> None:
        """Sum the costs of the blocks on one microbatch. `works` has the work of each block.

        Raises:
            SearchError: The workload has no costs for the layout's size of the tensor axis.
        """
        workload = space.workload
        self.layout, self.params, self.links = layout, params, links
        self.host, self.states, self.blocks = space.hardware.host, workload.states, len(workload.blocks)
        self._step = space.hardware.step
        self._gather, self._reductions = _collectives(links, space.hardware.collectives)
        self._processes = space.hardware.at_once is not None
        samples = samples_of(workload, layout)
        sums: list[list[Number]] = [[], [], [], [], [], []]
        packed = params.packed if layout.microbatches > 1 else params.packed_one_microbatch
        self.output: list[Number] = []
        for k, (block, work) in enumerate(zip(workload.blocks, works, strict=True)):
            if work is None:
                raise SearchError(
                    f"search: the workload has no costs of block {block.name!r} for tensor parallelism over "
                    f"{layout.tensor} devices. Give the workload these costs: analytic(..., "
                    f"tensor=[{layout.tensor}]) [PIPER-P004]"
                )
            moved: Number = 2 * ring(links.tensor, work.exchanged, layout.tensor)
            if layout.routed > 1 and block.routed:  # one message to the experts and one back
                both = block.routed * samples * (layout.routed - 1)
                moved += links.routed.latency + message(links.routed, both, layout.routed)
            # Buckets and sums are work of the whole step. Divide it over the BW of all microbatches.
            beside = (packed[k] if layout.replicas > 1 else 0) + params.added[k] * (layout.microbatches - 1)
            weights = work.backward_weights + (beside / layout.microbatches if beside else 0)
            own = (
                work.forward + moved,
                work.backward_input + moved,
                weights,
                work.saved,
                work.saved_for_weights,
                work.apart,
            )
            for column, value in zip(sums, own, strict=True):
                column.append(value)
            self.output.append(work.output)
        self.forward, self.inputs, self.weights, self.saved, self.kept, self._apart = (
            [0, *accumulate(column)] for column in sums
        )
        self.least_output = min(self.output)

    def passes(
        self, span: Span, level: int, recomputed: bool, offloaded: bool
    ) -> tuple[Number, Number, Number, Number]:
        """Return the seconds of F, B, BI and BW of a stage. `recomputed` and `offloaded` say how the
        stage keeps saved values.

        A pass takes the longest of three times: of its work, of the transfer of its saved values to or from
        the host, and of the gather of its parameters, block by block. The transfer counts only if `offloaded`
        is set, and not for BW. The gather counts only at level 3.
        """
        i, j = span
        f, bi, bw = (column[j] - column[i] for column in (self.forward, self.inputs, self.weights))
        extra = f if recomputed else 0
        b, bi, bw = bi + bw + extra, bi + extra, bw + self._apart[j] - self._apart[i]
        if offloaded:
            moved = message(self.host, self.saved[j] - self.saved[i])
            f, b, bi = max(f, moved), max(b, moved), max(bi, moved)
        if level == 3:
            gather = self.ring(span)
            f, b, bi, bw = max(f, gather), max(b, gather), max(bi, gather), max(bw, gather)
        return f, b, bi, bw

    def ring(self, span: Span) -> Number:
        """Return the seconds of an all-gather of a stage's parameters over the replicas that shard them; 0 if
        they are not sharded."""
        return self._time(self._gather, span, trained=False)

    def reduction(self, span: Span, level: int) -> Number:
        """Return the seconds of the sum of a stage's gradients over the replicas: `repeated_sum` and
        `last_sum` together. 0 with one replica."""
        return self.repeated_sum(span, level) + self.last_sum(span, level)

    def repeated_sum(self, span: Span, level: int) -> Number:
        """Return the seconds of the sum that levels 2 and 3 repeat for each microbatch: an all-reduce at level
        0, otherwise a reduce-scatter over the replicas of a group."""
        return self._time(self._reductions[level > 0][0], span, trained=True)

    def last_sum(self, span: Span, level: int) -> Number:
        """Return the seconds of the sum after the last repeated sum: an all-reduce of the shards over the
        groups of replicas. 0 at level 0, and with one group."""
        return sum(self._time(pair, span, trained=True) for pair in self._reductions[level > 0][1:])

    def _time(self, pair: Pair, span: Span, trained: bool) -> Number:
        """Return the seconds of a collective of the parameters of a stage, or only of the trained ones."""
        both = self.params.of((span,), trained=trained)
        return sum(each.time(nbytes) for each, nbytes in zip(pair, both, strict=True))

    def gather_slopes(self) -> tuple[Number, Number]:
        """Return two numbers, the seconds per byte of `ring` of parameters outside of experts and of experts.
        The part of the time that does not depend on the bytes is not included."""
        return self._gather[0].slope, self._gather[1].slope

    def reduction_slopes(self, level: int) -> tuple[Number, Number]:
        """Return the seconds per byte of `reduction`, like `gather_slopes`."""
        first, second = zip(*self._reductions[level > 0], strict=True)
        return sum(each.slope for each in first), sum(each.slope for each in second)

    def update(self, spans: Sequence[Span], levels: Sequence[int]) -> Number:
        """Return the seconds of the optimizer on a rank with these stages, plus the hardware's overhead of a
        step (`Hardware.step`)."""
        n = self.layout.shard_size
        found: Number = self._step
        for k, members in enumerate((n, n // self.layout.routed)):
            for (i, j), level in zip(spans, levels, strict=True):
                sums = (self.params.in_parts if level else self.params.updated)[k]
                whole = sums[j] - sums[i]
                found += whole / members if level and whole else whole
        return found

    def hop(self, border: int, block: int) -> Number:
        """Return the seconds of a message across the boundary after stage `border`. `block` is the first
        block after the boundary. 0 if both stages are on one rank."""
        link = self.links.hops[border]
        return 0 if link is None else message(link, self.output[block - 1])

    def least_hop(self, border: int) -> Number:
        """Return a lower bound of `hop` for any cut of the blocks."""
        link = self.links.hops[border]
        return 0 if link is None else message(link, self.least_output)

    def static(self, spans: Sequence[Span], levels: Sequence[int], lowest: bool = False) -> Number:
        """Return the bytes of parameters, gradients and optimizer states of a rank with these stages.

        If gradients or parameters are sharded, two blocks of them are gathered at a time. Processes of one
        machine also keep a buffer in which they sum gradients.

        Args:
            spans, levels: The blocks and the ZeRO level of each stage of the rank.
            lowest: Leave out the gathered blocks, this buffer, and parameters that several blocks use. The
                result is then also a lower bound for all lower levels.
        """
        n, own = self.layout.shard_size, self.layout.shard_size // self.layout.routed

        def held(least: int, trained: bool, gathered: Sequence[int] = ()) -> int:
            """Return the bytes of a rank's parameters if stages at level `least` or above shard them, and
            other stages do not.

            Args:
                trained: Count only parameters that get gradients.
                gathered: For each block, its bytes when gathered. Add twice the largest one (default: none).
            """
            shared = [span for span, level in zip(spans, levels, strict=True) if level >= least]
            whole = [span for span, level in zip(spans, levels, strict=True) if level < least]
            parts = self.params.of(shared, not lowest, trained)
            two = (
                min(sum(parts), 2 * max(max(gathered[i:j]) for i, j in shared))
                if gathered and shared and not lowest
                else 0
            )
            return (
                sum(self.params.of(whole, not lowest, trained)) - (-parts[0] // n) - (-parts[1] // own) + two
            )

        states: Number = self.states * held(1, True)
        made = states + held(2, True, self.params.trained_bytes) + held(3, False, self.params.block_bytes)
        if lowest or self.layout.replicas == 1 or not self._processes:
            return made
        summed = [span for span, level in zip(spans, levels, strict=True) if level < 2]
        return made + min(sum(self.params.of(summed, trained=True)), LENT)

    def updating(self, spans: Sequence[Span], levels: Sequence[int]) -> int:
        """Return the bytes that a rank with these stages needs for temporary tensors of the update. This is 0
        if devices are not processes of a machine.

        Adam makes two tensors as large as a parameter, or as the parameter's shard on this device. It updates
        one parameter at a time. No saved activations are left during the update.
        """
        if not self._processes:
            return 0
        parts = self.layout.shard_size // self.layout.routed
        largest = [
            max(self.params.largest_update[i:j]) // (parts if level else 1)
            for (i, j), level in zip(spans, levels, strict=True)
        ]
        return 2 * max(largest)

    def border(self, spans: Sequence[Span]) -> Number:
        """Return the bytes of the largest message between a rank with these stages and its neighbors; 0 if it
        has all blocks."""
        ends = [block for i, j in spans for block in (i, j) if 0 < block < self.blocks]
        return max((self.output[block - 1] for block in ends), default=0)

    def accumulating(self, spans: Sequence[Span], levels: Sequence[int]) -> int:
        """Return the most bytes of gradients that a pass has made and not yet added to the sums over
        microbatches. This is 0 with one microbatch, and if all stages shard gradients.

        These gradients matter at the end of the step, when a rank keeps little else. If several stages of a
        rank use a parameter, each stage first has its own sum, and a gradient to add to this sum.
        """
        whole = [span for span, level in zip(spans, levels, strict=True) if level < 2]
        if self.layout.microbatches == 1 or not whole:
            return 0
        made = [sum(self.params.of((span,), trained=True)) for span in whole]
        for tied in self.params.tied:
            users = sum(any(i <= block < j for block in tied.blocks) for i, j in whole)
            made.append((2 * users - 1) * tied.nbytes if users and tied.trains else 0)
        return max(made)


def _collectives(links: Links, measured: Mapping[int, Collectives]) -> tuple[Pair, list[list[Pair]]]:
    """Return the gather of parameters, and for level 0 and for other levels the sums of gradients in order.

    Args:
        links: The links of the layout.
        measured: Number of members -> measured times of collectives of neighboring devices.
    """

    def pair(kind: str, passes: int, groups: tuple[Groups, Groups]) -> Pair:
        known = [measured.get(each.members) for each in groups]
        first, second = (
            ReplicaCollective(each, passes, measured=None if own is None else getattr(own, kind))
            for each, own in zip(groups, known, strict=True)
        )
        return first, second

    across = tuple(ReplicaCollective(links.across, 2, parts=each.members) for each in links.shards)
    scatter = pair("scatter", 1, links.shards)
    return pair("gather", 1, links.shards), [
        [pair("sum", 2, links.holders)],
        [scatter, (across[0], across[1])],
    ]


def samples_of(workload: Workload, layout: Layout) -> int:
    """Return the samples of a microbatch of a layout."""
    return workload.samples // layout.replicas // layout.microbatches


class FixedBytes(NamedTuple):
    """The bytes of a device that do not depend on the ways in which its stages keep saved values.

    Attributes:
        static: Of parameters, gradients and optimizer states.
        messages: Of messages, while passes run.
        ends: Needed at the end of the step, when no saved values are left.
    """

    static: Number
    messages: Number
    ends: Number


class CostModel:
    """A space, with cached functions: `costs(layout)` returns its `Costs`, `params(tensor, routed)` its `Params`,
    `works(samples, tensor)` the work of each block, and `fixed_bytes(layout, levels, cuts)` the `FixedBytes` of
    each rank."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.params = functools.cache(functools.partial(Params, space.workload))
        self.works = functools.cache(self._works)
        self._links = LinkTable(space.hardware)
        self.costs = functools.lru_cache(maxsize=4096)(self._costs)
        self.fixed_bytes = functools.lru_cache(maxsize=16)(self._fixed_bytes)

    def _costs(self, layout: Layout) -> Costs:
        # Links depend neither on the schedule's name nor on the number of microbatches, so layouts that
        # differ only in these share a cache entry.
        name = "zbv" if SEARCHED[layout.schedule].folded else "one_f_one_b"
        links = self._links.of(layout._replace(schedule=name, microbatches=1))
        works = self.works(samples_of(self.space.workload, layout), layout.tensor)
        return Costs(self.space, layout, self.params(layout.tensor, layout.routed), links, works)

    def _works(self, samples: int, tensor: int) -> list[Work | None]:
        # Equal layers share the mapping of their work.
        known = {id(block.work): block for block in self.space.workload.blocks}
        works = {key: block.at(samples, tensor) for key, block in known.items()}
        return [works[id(block.work)] for block in self.space.workload.blocks]

    def _fixed_bytes(
        self, layout: Layout, levels: tuple[int, ...], cuts: tuple[int, ...]
    ) -> list[FixedBytes]:
        costs, found = self.costs(layout), []
        edges = (0, *cuts, costs.blocks)
        for local in rows_of(layout.schedule, layout.per_rank, layout.ranks, layout.microbatches).local:
            spans, own = [(edges[s], edges[s + 1]) for s in local], [levels[s] for s in local]
            ends = max(costs.accumulating(spans, own), costs.updating(spans, own))
            found.append(FixedBytes(costs.static(spans, own), 2 * costs.border(spans), ends))
        return found
