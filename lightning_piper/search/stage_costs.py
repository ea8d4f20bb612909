"""What stages cost under a layout: any run of blocks in constant time, from sums over the chain."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_piper.errors import SearchError
from lightning_piper.runtime.process import MOST as LENT
from lightning_piper.search.rows import SHAPES, rank_of
from lightning_piper.search.space import Layout, Space
from lightning_piper.search.workload import Block, Workload
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.simulate.network import Link

Span = tuple[int, int]  # a stage: its first block, and the one behind its last


def message(link: Link, nbytes: Number, parts: int = 1) -> Number:
    """Of `nbytes / parts` bytes, as `Link.time`, for any number of bytes."""
    if isinstance(nbytes, int):
        return link.time(nbytes, parts)
    return link.latency if link.bandwidth is None else link.latency + nbytes / parts / link.bandwidth


def ring(link: Link, nbytes: Number, members: int) -> Number:
    """A reduce-scatter or an all-gather of `nbytes` (Patarasuk and Yuan 2009): n - 1 messages of 1/n of them in turn."""
    return (members - 1) * message(link, nbytes, members) if members > 1 and nbytes else 0


class Links(NamedTuple):
    """The links of a layout: the farthest of all groups that an axis has.

    Attributes:
        tensor, data, routed: between all members of a group.
        hops: of each border between stages; None where both stages are on one rank.
        ends: between any two ranks.
    """

    tensor: Link
    data: Link
    routed: Link
    hops: tuple[Link | None, ...]
    ends: Link


def links_of(hardware: Hardware, layout: Layout) -> Links:
    """Every device of a rank is at the same place of its own pipeline, so what the slowest pair needs is what all wait for."""
    t, n, ranks = layout.tensor, layout.replicas, layout.ranks

    def device(replica: int, rank: int) -> int:
        return t * (replica + n * rank if layout.data_inside else rank + ranks * replica)

    order = [link for _, link in hardware.links]

    def farthest(pairs: Iterable[tuple[int, int]]) -> Link:
        most = 0
        for a, b in pairs:
            most = max(most, order.index(hardware.link(min(a, b), max(a, b) + t - 1)))
            if most == len(order) - 1:
                break
        return order[most]

    folded = SHAPES[layout.schedule].folded
    places = [rank_of(stage, ranks, folded) for stage in range(layout.stages)]
    hops: dict[tuple[int, int], Link | None] = {
        (a, b): None if a == b else farthest((device(x, a), device(x, b)) for x in range(n)) for a, b in set(pairwise(places))
    }

    def within(members: int) -> Link:
        """Groups of so many replicas."""
        return farthest((device(x, r), device(x + members - 1, r)) for r in range(ranks) for x in range(0, n, members))

    return Links(within(1), within(n), within(layout.routed), tuple(hops[pair] for pair in pairwise(places)),
                 farthest((device(x, 0), device(x, ranks - 1)) for x in range(n)))  # fmt: skip


def _held(block: Block, tensor: int, routed: int) -> tuple[Number, Number]:
    """What a device has of a block's bytes, as a share: of whole parameters, and of routed ones."""
    found = [0, 0]
    for name, nbytes in block.params.items():
        is_routed = name in block.experts
        found[is_routed] += nbytes // ((tensor if name in block.divided else 1) * (routed if is_routed else 1))
    whole = sum(block.params.values()) or 1
    return Fraction(found[0], whole), Fraction(found[1], whole)


def _part(seconds: Number, share: Number) -> Number:
    return seconds * share if seconds and share else 0


class Tied(NamedTuple):
    """A parameter that several blocks use: its bytes, whether it is routed, and whether it gets gradients."""

    nbytes: int
    is_routed: bool
    trains: bool
    blocks: tuple[int, ...]


class Params:
    """Bytes of parameters on one device: a tied one counts once on each rank that uses it.

    Attributes:
        tied: those that several blocks use.
        largest, largest_trained: bytes of each block, of all of its parameters and of those that get gradients.
        largest_update: bytes of the largest parameter of each block that gets a gradient.
        packed, packed_alone, added: seconds to lay the gradients of each block into a bucket (if there is one microbatch, those
            that are not made there), and to add them to others.
        updated, in_parts: sums over the chain of the seconds of updates, of whole parameters and of routed ones; of parameters as
            they are, and of pieces of them, all together.
    """

    def __init__(self, workload: Workload, tensor: int, routed: int) -> None:
        users: dict[str, list[int]] = {}
        for k, block in enumerate(workload.blocks):
            for name in block.params:
                users.setdefault(name, []).append(k)
        alone = [[0, 0, 0, 0] for _ in workload.blocks]  # of whole parameters and of routed ones; of those that get gradients
        self.largest, self.largest_trained, self.largest_update = ([0] * len(workload.blocks) for _ in range(3))
        self.tied: list[Tied] = []
        for name, blocks in users.items():
            block = workload.blocks[blocks[0]]
            is_routed, trains = name in block.experts, name not in block.frozen
            parts = (tensor if name in block.divided else 1) * (routed if is_routed else 1)
            nbytes = -(-block.params[name] // parts)
            for k in blocks:
                self.largest[k] += nbytes
                self.largest_trained[k] += nbytes * trains
                self.largest_update[k] = max(self.largest_update[k], nbytes * trains)
            if len(blocks) > 1:
                self.tied.append(Tied(nbytes, is_routed, trains, tuple(blocks)))
            else:
                alone[blocks[0]][is_routed] += nbytes
                alone[blocks[0]][2 + is_routed] += nbytes * trains
        self._alone = [[0, *accumulate(own[k] for own in alone)] for k in range(4)]
        held = [(block, _held(block, tensor, routed)) for block in workload.blocks]
        self.packed = [_part(block.packed, sum(share)) for block, share in held]
        self.packed_alone = [_part(block.packed_alone, sum(share)) for block, share in held]
        self.added = [_part(block.added, sum(share)) for block, share in held]
        self.updated = [[0, *accumulate(_part(block.updated, share[k]) for block, share in held)] for k in (0, 1)]
        self.in_parts = [[0, *accumulate(_part(block.updated_in_parts, share[k]) for block, share in held)] for k in (0, 1)]

    def of(self, spans: Sequence[Span], tied: bool = True, trained: bool = False) -> tuple[int, int]:
        """Bytes of whole parameters and of routed ones, on a rank with these stages; without tied ones if these are left out.

        Args:
            trained: only of those that get gradients.
        """
        found = [sum(own[j] - own[i] for i, j in spans) for own in (self._alone[2:] if trained else self._alone[:2])]
        for each in self.tied if tied else ():
            if (each.trains or not trained) and any(i <= k < j for k in each.blocks for i, j in spans):
                found[each.is_routed] += each.nbytes
        return found[0], found[1]


class Costs:
    """Stages of one layout. Everything grows with the blocks of a stage.

    Attributes:
        layout: that the stages are of.
        links: between its devices.
        blocks: how many there are.
        params: bytes on one device.
        output: bytes that each block hands on.
    """

    def __init__(self, space: Space, layout: Layout, params: Params, links: Links) -> None:
        workload = space.workload
        self.layout, self.params, self.links = layout, params, links
        self.host, self.states, self.blocks = space.hardware.host, workload.states, len(workload.blocks)
        self._collectives, self._step = space.hardware.collectives, space.hardware.step
        self._processes = space.hardware.at_once is not None
        samples = workload.samples // layout.replicas // layout.microbatches
        sums: list[list[Number]] = [[], [], [], [], [], []]
        packed = params.packed if layout.microbatches > 1 else params.packed_alone
        self.output: list[Number] = []
        for k, block in enumerate(workload.blocks):
            work = block.at(samples, layout.tensor)
            if work is None:
                raise SearchError(f"block {block.name!r}: no work is known of {layout.tensor} members of the tensor axis")
            moved = 2 * ring(links.tensor, work.exchanged, layout.tensor)
            if layout.routed > 1 and block.routed:  # out and back
                moved += 2 * message(links.routed, block.routed * samples * (layout.routed - 1), layout.routed)
            beside = (packed[k] if layout.replicas > 1 else 0) + params.added[k] * (layout.microbatches - 1)
            weights = work.backward_weights + (beside / layout.microbatches if beside else 0)
            own = (work.forward + moved, work.backward_input + moved, weights, work.saved, work.saved_for_weights, work.apart)
            for column, value in zip(sums, own, strict=True):
                column.append(value)
            self.output.append(work.output)
        self.forward, self.inputs, self.weights, self.saved, self.kept, self._apart = ([0, *accumulate(column)] for column in sums)
        self.least_output = min(self.output)

    def passes(self, span: Span, level: int, recomputed: bool, offloaded: bool) -> tuple[Number, Number, Number, Number]:
        """Seconds of F, B, BI and BW, with what overlaps with them: a pass takes as long as the longest of its work, the
        transfer of what it saves to the host or back, and (level 3) the gather of its parameters, block by block."""
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
        """Seconds of an all-gather of a stage's parameters, over the replicas."""
        return self._collective(span, "gather", 1)

    def reduction(self, span: Span, level: int) -> Number:
        """Seconds of the sum of a stage's gradients."""
        return self._collective(span, "scatter", 1) if level else self._collective(span, "sum", 2)

    def _collective(self, span: Span, kind: str, rings: int) -> Number:
        found: Number = 0
        n = self.layout.replicas
        for nbytes, members in zip(self.params.of((span,), trained=kind != "gather"), (n, n // self.layout.routed), strict=True):
            known = self._collectives.get(members)
            if nbytes and members > 1 and known is not None:
                found += message(getattr(known, kind), nbytes)
            else:
                found += rings * ring(self.links.data, nbytes, members)
        return found

    def slopes(self, kind: str, rings: int) -> tuple[Number, Number]:
        """Seconds of each byte of a collective, of whole parameters and of routed ones, beside what it takes for any."""
        n, found = self.layout.replicas, list[Number]()
        for members in (n, n // self.layout.routed):
            known = self._collectives.get(members)
            link, share = (
                (getattr(known, kind), 1) if known is not None else (self.links.data, Fraction(rings * (members - 1), members))
            )
            found.append(share / link.bandwidth if members > 1 and link.bandwidth is not None else 0)
        return found[0], found[1]

    def update(self, spans: Sequence[Span], levels: Sequence[int]) -> Number:
        """Seconds that the optimizer takes on a rank with these stages, at these levels, and what a step takes beside all else."""
        n = self.layout.replicas
        found: Number = self._step
        for k, members in enumerate((n, n // self.layout.routed)):
            for (i, j), level in zip(spans, levels, strict=True):
                sums = (self.params.in_parts if level else self.params.updated)[k]
                whole = sums[j] - sums[i]
                found += whole / members if level and whole else whole
        return found

    def hop(self, border: int, block: int) -> Number:
        """Seconds of a message over the border behind stage `border`, which `block` follows."""
        link = self.links.hops[border]
        return 0 if link is None else message(link, self.output[block - 1])

    def least_hop(self, border: int) -> Number:
        """Wherever the border is."""
        link = self.links.hops[border]
        return 0 if link is None else message(link, self.least_output)

    def static(self, spans: Sequence[Span], levels: Sequence[int], alone: bool = False) -> Number:
        """Bytes of parameters, gradients and states of a rank with these stages, at these levels. With gradients or parameters
        shared, two blocks of either are whole at a time; and processes of one machine keep room in which they sum gradients.
        `alone`: without these, and without what several blocks use; then it is the least for any lower levels, too."""
        n, own = self.layout.replicas, self.layout.replicas // self.layout.routed

        def held(least: int, trained: bool, largest: Sequence[int] = ()) -> int:
            """Of what stages at some level, or at a higher one, share."""
            shared = [span for span, level in zip(spans, levels, strict=True) if level >= least]
            whole = [span for span, level in zip(spans, levels, strict=True) if level < least]
            parts = self.params.of(shared, not alone, trained)
            two = min(sum(parts), 2 * max(max(largest[i:j]) for i, j in shared)) if largest and shared and not alone else 0
            return sum(self.params.of(whole, not alone, trained)) - (-parts[0] // n) - (-parts[1] // own) + two

        states: Number = self.states * held(1, True)
        made = states + held(2, True, self.params.largest_trained) + held(3, False, self.params.largest)
        if alone or n == 1 or not self._processes:
            return made
        summed = [span for span, level in zip(spans, levels, strict=True) if level < 2]
        return made + min(sum(self.params.of(summed, trained=True)), LENT)

    def updating(self, spans: Sequence[Span], levels: Sequence[int]) -> int:
        """Bytes that processes of a machine take while they update these stages. Adam makes two tensors as large as a parameter, or
        as the part of it that is here, and takes one parameter after the other. (Nothing waits for a backward pass then.)"""
        if not self._processes:
            return 0
        parts = self.layout.replicas // self.layout.routed
        largest = [
            max(self.params.largest_update[i:j]) // (parts if level else 1) for (i, j), level in zip(spans, levels, strict=True)
        ]
        return 2 * max(largest)

    def accumulating(self, spans: Sequence[Span], levels: Sequence[int]) -> int:
        """Bytes of gradients of several microbatches beside their sums, when little else is kept: what a pass has just made. A
        parameter that several stages of a rank use has a sum in each of them first, and a gradient to be added to it."""
        whole = [span for span, level in zip(spans, levels, strict=True) if level < 2]
        if self.layout.microbatches == 1 or not whole:
            return 0
        made = [sum(self.params.of((span,), trained=True)) for span in whole]
        for tied in self.params.tied:
            users = sum(any(i <= block < j for block in tied.blocks) for i, j in whole)
            made.append((2 * users - 1) * tied.nbytes if users and tied.trains else 0)
        return max(made)


class Model:
    """A space, and the costs of its layouts and the bytes of its parameters, each made once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.params = functools.cache(functools.partial(Params, space.workload))
        self._links = functools.cache(functools.partial(links_of, space.hardware))
        self.costs = functools.lru_cache(maxsize=4096)(self._costs)

    def _costs(self, layout: Layout) -> Costs:
        # Links depend on neither the schedule's name nor the microbatches: what is equal is made once.
        name = "zbv" if SHAPES[layout.schedule].folded else "one_f_one_b"
        links = self._links(layout._replace(schedule=name, microbatches=1))
        return Costs(self.space, layout, self.params(layout.tensor, layout.routed), links)
