"""The links of a layout: between stages, inside of tensor-parallel groups, and among replicas.

A collective of a group goes around rings. Suppose that a group is on several nodes, with the same number of
members on each, and at least two. Then there are two kinds of rings, as in `HierarchicalRing`. One ring is inside
of each node, and the other rings are across the nodes, each with a part of the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.rows import rank_of
from lightning_piper.search.space import Layout
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.simulate.network import HierarchicalRing, Link


def message(link: Link, nbytes: Number, parts: int = 1) -> Number:
    """Return the seconds of a message of `nbytes / parts` bytes. Unlike `Link.time`, accept an `nbytes` that
    is not an integer. The results are equal."""
    if isinstance(nbytes, int) and not isinstance(link.bandwidth, float):  # fractions would take longer
        return link.time(nbytes, parts)
    return link.latency if link.bandwidth is None else link.latency + nbytes / parts / link.bandwidth


def ring(link: Link, nbytes: Number, members: int, parts: int = 1) -> Number:
    """Return the seconds of a reduce-scatter or all-gather of `nbytes / parts` bytes over a ring (Patarasuk and
    Yuan 2009).

    Each of the n members sends n - 1 messages in turn, each with 1/n of the bytes. Without members or bytes
    to communicate, it takes 0 seconds.
    """
    return (members - 1) * message(link, nbytes, members * parts) if members > 1 and nbytes else 0


class RingPass(NamedTuple):
    """A phase of a collective: one pass around a ring of `members` devices, with 1/`parts` of the bytes."""

    members: int
    parts: int
    link: Link


class Groups(NamedTuple):
    """Groups of devices that communicate at the same time, such as the replicas of each rank.

    Attributes:
        members: Number of devices of each group.
        rings: The phases of one pass around the rings of a group, for each different group. The slowest group
            decides the time.
    """

    members: int
    rings: tuple[tuple[RingPass, ...], ...]

    def time(self, nbytes: Number, parts: int = 1) -> Number:
        """Return the seconds of a reduce-scatter or all-gather of `nbytes / parts` bytes."""
        if self.members == 1 or not nbytes:
            return 0
        return max(
            sum(ring(phase.link, nbytes, phase.members, phase.parts * parts) for phase in phases)
            for phases in self.rings
        )

    @property
    def slope(self) -> Number:
        """The seconds per byte of a reduce-scatter or all-gather, without latencies."""
        if self.members == 1:
            return 0
        return max(
            sum(
                Fraction(phase.members - 1, phase.members * phase.parts) / phase.link.bandwidth
                for phase in phases
                if phase.link.bandwidth is not None
            )
            for phases in self.rings
        )


class Links(NamedTuple):
    """A layout's links. A single link is the slowest one among all groups of its kind, or among all pipelines.

    Attributes:
        tensor: The link between all devices of a tensor-parallel group.
        routed: The link between all replicas that divide the experts' parameters among them.
        hops: The link across each boundary between stages. None if both stages are on one rank.
        ends: The link between the first and the last rank of a pipeline.
        holders: All replicas that have a parameter: of parameters outside of experts, and of experts.
        shards: The replicas that shard a parameter: outside of experts, and of experts.
        across: The replicas that have the same shards, one in each group of replicas.
    """

    tensor: Link
    routed: Link
    hops: tuple[Link | None, ...]
    ends: Link
    holders: tuple[Groups, Groups]
    shards: tuple[Groups, Groups]
    across: Groups


Devices = NDArray[np.int64]
# (first device, distance between neighbors, number of devices) of a group -> the phases of its collectives.
RingsOf = Callable[[int, int, int], tuple[RingPass, ...]]


class LinkTable:
    """The links of layouts on some hardware. Results are cached."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._rings: RingsOf = functools.cache(self._phases)
        self.of = functools.cache(self._of)

    def _phases(self, first: int, step: int, members: int) -> tuple[RingPass, ...]:
        found = self._hardware.ring(range(first, first + step * members, step))
        if isinstance(found, HierarchicalRing):
            count, each = len(found.nodes), len(found.nodes[0])
            return RingPass(each, 1, found.inside), RingPass(count, each, found.across)
        return (RingPass(members, 1, found),)

    def _of(self, layout: Layout) -> Links:
        """Return the links of a layout.

        The replicas run the same passes at the same time, so all of them wait for the slowest pair of devices.
        """
        t, n, ranks = layout.tensor, layout.replicas, layout.ranks
        sizes = [members for members, _ in self._hardware.links]
        order = [link for _, link in self._hardware.links]  # the nearest link first

        def farthest(a: Devices, b: Devices) -> Link:
            """Return the slowest link between two tensor-parallel groups, over all pairs of groups. `a` and `b` have
            the first devices of the two groups of each pair. If both are the same, the link is inside of the
            group."""
            first, last = np.minimum(a, b), np.maximum(a, b) + t - 1
            joins = np.stack(
                [first // size == last // size for size in sizes[:-1]] + [np.full(first.shape, True)]
            )
            return order[max(order.index(order[k]) for k in np.unique(joins.argmax(axis=0)))]

        folded, replicas = SEARCHED[layout.schedule].folded, np.arange(n)
        device: Any = layout.device  # for arrays of replicas and ranks, an array of devices
        stage_ranks = [rank_of(stage, ranks, folded) for stage in range(layout.stages)]
        hops: dict[tuple[int, int], Link | None] = {
            (a, b): None if a == b else farthest(device(replicas, a), device(replicas, b))
            for a, b in set(pairwise(stage_ranks))
        }

        def within(members: int) -> Link:
            """Return the slowest link within groups of this many replicas."""
            first, rank = np.meshgrid(np.arange(0, n, members), np.arange(ranks))
            return farthest(device(first, rank), device(first + members - 1, rank))

        size, routed = layout.shard_size, layout.routed
        return Links(
            within(1),
            within(routed),
            tuple(hops[pair] for pair in pairwise(stage_ranks)),
            farthest(device(replicas, 0), device(replicas, ranks - 1)),
            (self._groups(layout, range(1), 1, n), self._groups(layout, range(routed), routed, n // routed)),
            (
                self._groups(layout, range(0, n, size), 1, size),
                self._groups(
                    layout,
                    (x + k for x in range(0, n, size) for k in range(routed)),
                    routed,
                    size // routed,
                ),
            ),
            self._groups(layout, range(size), size, layout.groups),
        )

    def _groups(self, layout: Layout, firsts: Iterable[int], step: int, members: int) -> Groups:
        """Return the groups of the replicas x, x + step, x + 2 step, ... of each rank.

        Args:
            layout: The layout of the devices.
            firsts: The first replica of each group of a rank.
            step: The distance between the replicas of a group.
            members: The number of replicas of a group.
        """
        if members == 1:
            return Groups(1, ())
        distance = layout.device(step, 0) - layout.device(0, 0)
        device: Any = layout.device  # for arrays of replicas and ranks, an array of devices
        first, rank, each = np.meshgrid(list(firsts), np.arange(layout.ranks), np.arange(layout.tensor))
        # A group that begins this many devices later uses the same links.
        period = math.lcm(*(devices for devices, _ in self._hardware.links[:-1]))
        begins = np.unique((device(first, rank) + each) % period).tolist()
        return Groups(members, tuple({self._rings(begin, distance, members): None for begin in begins}))
