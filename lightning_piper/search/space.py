"""The candidates among which a search chooses: all programs of a few forms for a workload, on some devices.

A `Space` says which candidates there are, and counts them. A candidate has a `Layout` (how devices are
divided) and choices for each pipeline stage. `bounds` and `estimate` tell how good a candidate is, and
`program_writer` writes it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple

from lightning_piper.common.limits import DEVICES, integer, is_number, shown
from lightning_piper.errors import SearchError
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.rows import is_possible, rank_of
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

_UNITS = {  # unit of a size -> bytes
    "": 1,
    "B": 1,
    **{
        f"{letter}{i}B": (1024 if i else 1000) ** (n + 1)
        for n, letter in enumerate("KMGT")
        for i in ("", "i")
    },
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Layout(NamedTuple):
    """A division of the devices among stages, replicas and the tensor axis.

    The devices of a tensor-parallel group have consecutive numbers. The first device of rank r of replica x
    (`device`) is

        tensor * (x + replicas * r)     with `data_inside`: the replicas of one rank have near numbers
        tensor * (r + ranks * x)        otherwise: the ranks of one pipeline have near numbers

    Devices with near numbers have the faster links.

    Attributes:
        schedule: Name of a builder in `lightning_piper.schedules`.
        per_rank: Stages on each rank.
        ranks: Ranks of one pipeline.
        replicas: Number of pipelines. Each trains on an equal part of the samples.
        tensor: Devices along the tensor axis.
        routed: Number of replicas that divide the experts' parameters among them; 1 if each replica has all
            of them.
        microbatches: Microbatches of each replica.
        data_inside: Whether the replicas of one rank, and not the ranks of one pipeline, have near numbers.
        groups: Number of groups of replicas. Each group has all shards of its sharded stages (HSDP). Its
            replicas follow each other. With 1, all replicas together have one copy of the shards.
    """

    schedule: str
    per_rank: int
    ranks: int
    replicas: int
    tensor: int
    routed: int
    microbatches: int
    data_inside: bool
    groups: int = 1

    @property
    def shard_size(self) -> int:
        """Number of replicas that shard together."""
        return self.replicas // self.groups

    def device(self, replica: int, rank: int) -> int:
        """Return the first device of a rank of a replica."""
        index = replica + self.replicas * rank if self.data_inside else rank + self.ranks * replica
        return self.tensor * index

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    @property
    def devices(self) -> int:
        return self.ranks * self.replicas * self.tensor


class Family(NamedTuple):
    """A set of layouts with equal numbers of ranks, replicas, devices along the tensor axis, and microbatches.

    Attributes:
        ranks, replicas, tensor, microbatches: These numbers; see `Layout`.
        schedules: (name, stages on each rank) of each schedule of the layouts.
        numberings: (`routed`, `data_inside`, `groups`) of the layouts with each of these schedules.
    """

    ranks: int
    replicas: int
    tensor: int
    microbatches: int
    schedules: tuple[tuple[str, int], ...]
    numberings: tuple[tuple[int, bool, int], ...]

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts."""
        ranks, replicas, tensor, microbatches, schedules, numberings = self
        for (name, per_rank), (routed, inside, groups) in product(schedules, numberings):
            yield Layout(name, per_rank, ranks, replicas, tensor, routed, microbatches, inside, groups)


class Candidate(NamedTuple):
    """A program that a search can choose.

    Attributes:
        layout: How the devices are divided.
        levels: ZeRO level, 0 to 3, of each pipeline stage: how much of parameters, gradients and optimizer
            states the replicas shard. The level never rises along the chain, because the first stages keep
            most activations for their backward passes.
        recomputed: Number of stages, counted from the first, that save only their input and run their forward
            pass again.
        offloaded: Number of stages after the recomputed ones that keep their saved activations in host
            memory.
        cuts: The first block of each stage but the first. (3, 5): the stages have the blocks 0 to 2, 3 to 4,
            and all blocks from 5 on.
    """

    layout: Layout
    levels: tuple[int, ...]
    recomputed: int
    offloaded: int
    cuts: tuple[int, ...]

    def spans(self, blocks: int) -> list[tuple[int, int]]:
        """Return (first block, end (exclusive)) of each stage. `blocks` is the number of blocks."""
        return list(zip((0, *self.cuts), (*self.cuts, blocks), strict=True))


@dataclass(frozen=True)
class Space:
    """All candidates for a workload. A candidate may leave devices idle unless `all_devices` is set.

    Attributes:
        workload, hardware: The training step, and the machine that runs it.
        devices: Number of devices.
        memory: Bytes of each device that a candidate may use.
        schedules: Names of the schedules to consider.
        levels: ZeRO levels to consider.
        margin: Memory to keep free, as a share of the estimated memory.
        all_devices: Whether only candidates that use every device count.
        ranks: Largest number of ranks of one pipeline. None: as many as there are devices.

    Raises:
        SearchError: The workload has no blocks, the hardware has no links, or a number or name is not valid.
    """

    workload: Workload
    hardware: Hardware
    devices: int
    memory: Number
    schedules: tuple[str, ...] = field(default_factory=lambda: tuple(SEARCHED))
    levels: tuple[int, ...] = (0, 1, 2, 3)
    margin: Number = 0
    all_devices: bool = False
    ranks: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.workload, Workload) or not self.workload.blocks:
            raise SearchError(
                f"search: workload={shown(self.workload)} is not a Workload with blocks. Give a Workload with at "
                "least one block [PIPER-P001]"
            )
        check_hardware(self.hardware)
        _check_number("samples", self.workload.samples)
        check_choices(self.devices, self.schedules, self.levels, self.margin)
        if (
            not isinstance(self.memory, int | float | Fraction)
            or isinstance(self.memory, bool)
            or not self.memory > 0
        ):
            raise SearchError(
                f"search: memory={shown(self.memory)} is not usable. Give a number of bytes above 0 [PIPER-P001]"
            )

    def layouts(self) -> Iterator[Layout]:
        """Yield each layout once."""
        return (layout for family in self.families() for layout in family.layouts())

    def families(self) -> Iterator[Family]:
        """Yield each family of layouts once.

        All microbatches of all replicas have the same whole number of samples. This number is at least
        `Workload.least`, and at least the number in `Workload.least_divided` for the size of the tensor axis.
        If the step mixes samples, there is one microbatch.
        """
        work, schedules_of = self.workload, functools.cache(self._schedules)
        for tensor in self._degrees():
            least = max(work.least, work.least_divided.get(tensor, 1))
            for replicas in _divisors(work.samples, self.devices // tensor):
                most = min(len(work.blocks), self.devices // tensor // replicas, self.ranks or self.devices)
                numberings = [
                    (ranks, self._numberings(ranks, replicas, tensor))
                    for ranks in range(1, most + 1)
                    if not self.all_devices or ranks * tensor * replicas == self.devices
                ]
                for microbatches in _divisors(work.samples // replicas, 1 if work.meets else None):
                    if work.samples // replicas // microbatches >= least:
                        for ranks, numbered in numberings:
                            schedules = schedules_of(ranks, microbatches)
                            if schedules:
                                yield Family(ranks, replicas, tensor, microbatches, schedules, numbered)

    def _schedules(self, ranks: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        """Return the schedules to consider for these numbers, as in `Family`. With one microbatch, leave out each
        schedule that has the same passes as a different schedule of the space (`alike`)."""
        return tuple(
            (name, per_rank)
            for name in self.schedules
            if microbatches > 1 or SEARCHED[name].alike not in self.schedules
            for per_rank in SEARCHED[name].per_rank
            if ranks * per_rank <= len(self.workload.blocks)
            and is_possible(name, per_rank, ranks, microbatches)
        )

    def _numberings(self, ranks: int, replicas: int, tensor: int) -> tuple[tuple[int, bool, int], ...]:
        """Return the numberings to consider for these numbers, as in `Family`."""
        degrees = _divisors(replicas) if any(block.routed for block in self.workload.blocks) else [1]
        # If all devices are equally far apart, the numbering of the devices does not matter.
        last = ranks * replicas * tensor - 1
        far = ranks > 1 and replicas > 1 and self.hardware.link(0, last) != self.hardware.link(0, 1)
        divided = [
            (inside, [1, *self._groups(Layout("", 1, ranks, replicas, tensor, 1, 1, inside))])
            for inside in ((True, False) if far else (True,))
        ]
        return tuple(
            (routed, inside, groups)
            for routed in degrees
            for inside, found in divided
            for groups in found
            if groups == 1 or replicas // groups % routed == 0
        )

    def _groups(self, layout: Layout) -> list[int]:
        """Return the numbers of groups into which the search divides the replicas of a layout, above 1.

        Groups exist to keep gathers off slow links. So the devices of each group must have a nearer link to
        each other than the devices of all replicas of a rank.
        """
        links, n = self.hardware.links, layout.replicas
        if not any(self.levels) or n == 1 or len(links) == 1:
            return []

        def level(size: int) -> int:
            """Return the index of the nearest link that joins each group of this many replicas, or of the last
            link."""
            # The groups lie in runs of consecutive devices. The groups of one run overlap each other, or there is
            # only one.
            run = layout.tensor * size * (1 if layout.data_inside else layout.ranks)
            joined = (k for k, (m, _) in enumerate(links[:-1]) if m >= layout.devices or m % run == 0)
            return next(joined, len(links) - 1)

        whole = level(n)
        near = [size for size in _divisors(n)[1:-1] if level(size) < whole]
        return [n // size for size in near if links[level(size)][1] != links[whole][1]]

    def _degrees(self) -> list[int]:
        """Return the sizes of the tensor axis for which every block has costs, up to the number of
        devices."""
        known = [{members for _, members in block.work} for block in self.workload.blocks]
        return sorted(t for t in set.intersection(*known) if t <= self.devices)

    def levels_of(self, layout: Layout) -> list[tuple[int, ...]]:
        """Return sets of ZeRO levels, such as `[(3,), (2, 1), (0,)]`. The stages of a candidate may have any
        levels of one set. A set lists the highest level first.

        With one replica, all stages have level 0, whatever `levels` allows. With groups of replicas, the first
        stage has a level above 0 (`shards_some`). If stages share a trained
        parameter, there are several sets, because other mixtures are not valid programs. The parameter is
        sharded in all of its stages or in none. Of the stages on one device that use it, either all keep it
        gathered between its uses (level < 3), or none does.
        """
        return self._counted(layout)[0]

    def _counted(self, layout: Layout) -> tuple[list[tuple[int, ...]], int]:
        """Return the results of `levels_of` and `candidates`. They are cached, because many layouts differ only in
        numbers that do not matter here."""
        key = layout.schedule, layout.per_rank, layout.ranks, min(layout.replicas, 2), min(layout.groups, 2)
        found = self._known_counts.get(key)
        if found is None:
            sets = self._level_sets(layout)
            found = self._known_counts[key] = sets, self._count(layout, sets)
        return found

    def _level_sets(self, layout: Layout) -> list[tuple[int, ...]]:
        if layout.replicas == 1:
            return [(0,)]
        apart, meet = bool(self._tied), self._meet(layout)
        found: dict[tuple[bool, bool], list[int]] = {}
        for level in sorted(set(self.levels), reverse=True):
            found.setdefault((apart and level > 0, meet and level == 3), []).append(level)
        return [tuple(levels) for levels in found.values() if layout.groups == 1 or any(levels)]

    @functools.cached_property
    def _known_counts(self) -> dict[tuple[str | int, ...], tuple[list[tuple[int, ...]], int]]:
        return {}

    @functools.cached_property
    def _known_sizes(self) -> dict[tuple[object, ...], int]:
        return {}

    @functools.cached_property
    def _tied(self) -> list[list[int]]:
        """For each trained parameter that several blocks use, the indices of these blocks."""
        users: dict[str, list[int]] = {}
        for k, block in enumerate(self.workload.blocks):
            for name in block.params.keys() - block.frozen:
                users.setdefault(name, []).append(k)
        return [blocks for blocks in users.values() if len(blocks) > 1]

    def _meet(self, layout: Layout) -> bool:
        """Return whether some cut of the blocks lets two stages of one device use the same trained
        parameter."""
        left, folded = len(self.workload.blocks) - layout.stages, SEARCHED[layout.schedule].folded

        def positions(block: int) -> set[tuple[int, int]]:
            stages = range(max(0, block - left), min(block, layout.stages - 1) + 1)
            return {(rank_of(stage, layout.ranks, folded), stage) for stage in stages}

        return layout.per_rank > 1 and any(
            rank == other and s != t
            for blocks in self._tied
            for i, j in combinations(blocks, 2)
            for rank, s in positions(i)
            for other, t in positions(j)
        )

    def cuts(self, layout: Layout) -> int:
        """Return the number of ways to cut the blocks."""
        return math.comb(len(self.workload.blocks) - 1, layout.stages - 1)

    def candidates(self, layout: Layout) -> int:
        """Return the number of candidates with this layout."""
        return self._counted(layout)[1]

    def candidates_of(self, family: Family) -> int:
        """Return the number of candidates with the layouts of a family."""
        plain = sum(groups == 1 for _, _, groups in family.numberings)
        key = family.ranks, family.replicas > 1, family.schedules, plain, len(family.numberings)
        if key not in self._known_sizes:
            self._known_sizes[key] = sum(map(self.candidates, family.layouts()))
        return self._known_sizes[key]

    def _count(self, layout: Layout, sets: Sequence[tuple[int, ...]]) -> int:
        # How many stages recompute and how many offload; then the levels, which never rise along the chain.
        kept = math.comb(layout.stages + 2, 2)
        shared = sum(
            math.comb(layout.stages + len(levels) - 1, layout.stages)
            - (layout.groups > 1 and not levels[-1])  # without the choice of level 0 for all stages
            for levels in sets
        )
        return shared * kept * self.cuts(layout)

    @property
    def size(self) -> int:
        """The number of candidates."""
        return sum(map(self.candidates_of, self.families()))

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all candidates, one by one."""
        for layout in self.layouts():
            for levels in (
                own
                for any_of in self.levels_of(layout)
                for own in combinations_with_replacement(any_of, layout.stages)
                if shards_some(layout, own)
            ):
                for recomputed in range(layout.stages + 1):
                    for offloaded in range(layout.stages - recomputed + 1):
                        for cuts in combinations(range(1, len(self.workload.blocks)), layout.stages - 1):
                            yield Candidate(layout, levels, recomputed, offloaded, cuts)


def check_hardware(hardware: object) -> None:
    """Raise a `SearchError` unless this is a `Hardware` with links."""
    if not isinstance(hardware, Hardware):
        raise SearchError(
            f"search: hardware={shown(hardware)} is not a Hardware. Give one, such as Hardware.read('h100-sxm') "
            "[PIPER-P001]"
        )
    if not hardware.links:
        raise SearchError(
            "search: the hardware has no links. Give a Hardware with at least one link [PIPER-P001]"
        )


def shards_some(layout: Layout, levels: Sequence[int]) -> bool:
    """Return whether a candidate may have these ZeRO levels of its stages. With several groups of replicas, at
    least one stage must be sharded, because groups do not change other stages."""
    return layout.groups == 1 or levels[0] > 0


def check_choices(devices: int, schedules: Sequence[str], levels: Sequence[int], margin: Number) -> None:
    """Check these arguments of a search space. `search` calls this function before it measures the model.
    `Space` also calls it, and checks its other fields itself.

    Raises:
        SearchError: An argument is not valid.
    """
    _check_number("devices", devices, DEVICES)
    if not is_number(margin):
        raise SearchError(
            f"search: margin={shown(margin)} is not usable. Give a share such as 0.05 [PIPER-P001]"
        )
    if (
        not isinstance(schedules, list | tuple)
        or not schedules
        or not all(isinstance(name, str) and name in SEARCHED for name in schedules)
    ):
        raise SearchError(
            f"search: schedules={shown(schedules)} is not usable. Give a list of some of {', '.join(SEARCHED)} [PIPER-P001]"
        )
    if (
        not isinstance(levels, list | tuple | range)
        or not levels
        or not all(integer(level) in range(4) for level in levels)
    ):
        raise SearchError(
            f"search: levels={shown(levels)} is not usable. Give a list of some of 0, 1, 2, 3 [PIPER-P001]"
        )


def _check_number(what: str, value: object, most: int | None = None) -> None:
    """Raise a `SearchError` that names `what`, unless the value is an integer from 1 to `most` (None: no
    limit)."""
    number = integer(value)
    if number is None or number < 1 or (most is not None and number > most):
        raise SearchError(
            f"search: {what}={shown(value)} is not usable. Give an integer from 1{f' to {most}' if most else ' on'}"
            " [PIPER-P001]"
        )


def bytes_of(size: str | Number) -> Number:
    """Return the number of bytes that "24GiB" (24 x 2**30), "80GB" (80 x 10**9) or "512" means, rounded down
    to an integer. Return a number unchanged.

    Raises:
        SearchError: `size` is neither such a text nor a positive number.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match and match[2] in _UNITS:
        exact = Fraction(match[1]) * _UNITS[match[2]]
        if exact > 0:
            return int(exact)
    if (
        isinstance(size, int | float | Fraction)
        and not isinstance(size, bool)
        and is_number(size, positive=True)
    ):
        return size
    raise SearchError(
        f"search: memory={shown(size)} is not usable. Give bytes, at most 1e15, or text such as '24GiB' or '80GB' "
        "[PIPER-P001]"
    )


def _divisors(n: int, most: int | None = None) -> list[int]:
    """Return the divisors of n that are at most `most` (None: all divisors), in rising order."""
    limit = n if most is None else min(n, most)
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= limit]
