"""What a search chooses among."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

from lightning_piper.errors import SearchError
from lightning_piper.limits import DEVICES, integer, is_number, shown
from lightning_piper.search.rows import SHAPES, is_possible, rank_of
from lightning_piper.search.workload import Workload
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}{i}B": (1024 if i else 1000) ** (n + 1) for n, letter in enumerate("KMGT") for i in ("", "i")},
}
_ALIKE = {"one_f_one_b": "gpipe", "zb_h2": "zero_bubble"}  # the same passes in the same order, if there is one microbatch
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Layout(NamedTuple):
    """How devices are divided. Device numbers count the tensor axis first. Then come the replicas and then the ranks
    (`data_inside`), or the ranks first: so it is the replicas or the pipeline that have the better links.

    Attributes:
        schedule: name of a builder in `lightning_piper.schedules`.
        per_rank: stages on each rank.
        ranks: of one pipeline.
        replicas: pipelines, each with an equal part of the samples.
        tensor: members of the tensor axis.
        routed: replicas among which blocks that route samples divide the parameters that samples are routed to.
        microbatches: of each replica.
        data_inside: replicas are numbered before ranks.
    """

    schedule: str
    per_rank: int
    ranks: int
    replicas: int
    tensor: int
    routed: int
    microbatches: int
    data_inside: bool

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    @property
    def devices(self) -> int:
        return self.ranks * self.replicas * self.tensor


class Candidate(NamedTuple):
    """A program that a search can choose.

    Attributes:
        layout: how devices are divided.
        levels: what replicas share of parameters, gradients and states: ZeRO's level, 0 to 3, of each stage. It falls along the
            chain, if at all: the first stages keep most for their backward passes.
        recomputed: that many stages, from the first one on, keep nothing but their input and run their forward pass again.
        offloaded: that many stages after these keep what they save in the host's memory.
        cuts: the first block of each stage but the first.
    """

    layout: Layout
    levels: tuple[int, ...]
    recomputed: int
    offloaded: int
    cuts: tuple[int, ...]

    def spans(self, blocks: int) -> list[tuple[int, int]]:
        """First and last block (not included) of each stage."""
        return list(zip((0, *self.cuts), (*self.cuts, blocks), strict=True))


@dataclass(frozen=True)
class Space:
    """All candidates for a workload on some devices. Not every device need be used, unless `all_devices` says so.

    Attributes:
        workload, hardware: what is divided, and among what.
        devices: how many there are.
        memory: bytes that a candidate may use of each.
        schedules: names of schedules.
        levels: of ZeRO.
        margin: share of what the estimate says that is kept free beside it.
        all_devices: only candidates that use every device.
        ranks: of one pipeline, at most; None: as many as there are devices.

    Raises:
        SearchError: there is nothing to divide or nothing to divide it among, or a name is not known.
    """

    workload: Workload
    hardware: Hardware
    devices: int
    memory: Number
    schedules: tuple[str, ...] = tuple(SHAPES)
    levels: tuple[int, ...] = (0, 1, 2, 3)
    margin: Number = 0
    all_devices: bool = False
    ranks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.workload, Workload) or not self.workload.blocks:
            raise SearchError(f"search: the workload has no blocks ({shown(self.workload)}); give a Workload of one at least")
        if not isinstance(self.hardware, Hardware) or not self.hardware.links:
            raise SearchError("search: the hardware has no links; give a Hardware with one at least")
        _check_number("samples", self.workload.samples)
        check_choices(self.devices, self.schedules, self.levels, self.margin)
        if not isinstance(self.memory, int | float | Fraction) or isinstance(self.memory, bool) or not self.memory > 0:
            raise SearchError(f"search: memory={shown(self.memory)}; give bytes above 0, or text such as '80GiB'")

    def layouts(self) -> Iterator[Layout]:
        """Each once. Microbatches are whole samples, not too few, and work on them is known; where samples meet, there is one."""
        for tensor in self._degrees():
            least = max(self.workload.least, self.workload.least_divided.get(tensor, 1))
            for replicas in _divisors(self.workload.samples, self.devices // tensor):
                for microbatches in _divisors(self.workload.samples // replicas, 1 if self.workload.meets else None):
                    samples = self.workload.samples // replicas // microbatches
                    if samples >= least and all(b.at(samples, tensor) for b in self.workload.blocks):
                        yield from self._layouts(tensor, replicas, microbatches)

    def _layouts(self, tensor: int, replicas: int, microbatches: int) -> Iterator[Layout]:
        blocks = len(self.workload.blocks)
        degrees = _divisors(replicas) if any(block.routed for block in self.workload.blocks) else [1]
        most = min(blocks, self.devices // tensor // replicas, self.ranks or self.devices)
        for ranks in range(1, most + 1):
            if self.all_devices and ranks * tensor * replicas != self.devices:
                continue
            # Where all devices are equally far apart, their numbers do not matter.
            last = ranks * replicas * tensor - 1
            far = ranks > 1 and replicas > 1 and self.hardware.link(0, last) != self.hardware.link(0, 1)
            inside = (True, False) if far else (True,)
            for name in self._different(microbatches):
                for per_rank in SHAPES[name].per_rank:
                    if ranks * per_rank <= blocks and is_possible(name, per_rank, ranks, microbatches):
                        for routed in degrees:
                            for data_inside in inside:
                                yield Layout(name, per_rank, ranks, replicas, tensor, routed, microbatches, data_inside)

    def _different(self, microbatches: int) -> list[str]:
        """Schedules that are programs of their own: with one microbatch, some are others under a second name."""
        same = _ALIKE if microbatches == 1 else {}
        return [name for name in self.schedules if same.get(name) not in self.schedules]

    def _degrees(self) -> list[int]:
        known = [{members for _, members in block.work} for block in self.workload.blocks]
        return sorted(t for t in set.intersection(*known) if t <= self.devices)

    def levels_of(self, layout: Layout) -> list[tuple[int, ...]]:
        """Levels that the stages of one candidate may have, the highest first; several lists where not all of them go together.
        Replicas share something where there are several; one alone has level 0, whatever is allowed.

        A parameter that stages have in common is sharded in all of them or in none, and those on one device all keep it whole
        between its uses or none does: other programs are refused.
        """
        if layout.replicas == 1:
            return [(0,)]
        apart, meet = bool(self._tied), self._meet(layout)
        found: dict[tuple[bool, bool], list[int]] = {}
        for level in sorted(set(self.levels), reverse=True):
            found.setdefault((apart and level > 0, meet and level == 3), []).append(level)
        return [tuple(levels) for levels in found.values()]

    @functools.cached_property
    def _tied(self) -> list[list[int]]:
        """The blocks of each parameter that several of them use and train."""
        users: dict[str, list[int]] = {}
        for k, block in enumerate(self.workload.blocks):
            for name in block.params.keys() - block.frozen:
                users.setdefault(name, []).append(k)
        return [blocks for blocks in users.values() if len(blocks) > 1]

    def _meet(self, layout: Layout) -> bool:
        """Can two stages of a device have a parameter in common, wherever the blocks are cut?"""
        left, folded = len(self.workload.blocks) - layout.stages, SHAPES[layout.schedule].folded

        def places(block: int) -> set[tuple[int, int]]:
            stages = range(max(0, block - left), min(block, layout.stages - 1) + 1)
            return {(rank_of(stage, layout.ranks, folded), stage) for stage in stages}

        return layout.per_rank > 1 and any(
            rank == other and s != t
            for blocks in self._tied for i, j in combinations(blocks, 2)
            for rank, s in places(i) for other, t in places(j)
        )  # fmt: skip

    def cuts(self, layout: Layout) -> int:
        """How many ways there are to cut the blocks."""
        return math.comb(len(self.workload.blocks) - 1, layout.stages - 1)

    def candidates(self, layout: Layout) -> int:
        """How many candidates have this layout."""
        kept = math.comb(layout.stages + 2, 2)
        shared = sum(math.comb(layout.stages + len(levels) - 1, layout.stages) for levels in self.levels_of(layout))
        return shared * kept * self.cuts(layout)

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return sum(map(self.candidates, self.layouts()))

    def __iter__(self) -> Iterator[Candidate]:
        """All candidates: for small spaces."""
        for layout in self.layouts():
            for levels in (
                own for any_of in self.levels_of(layout) for own in combinations_with_replacement(any_of, layout.stages)
            ):
                for recomputed in range(layout.stages + 1):
                    for offloaded in range(layout.stages - recomputed + 1):
                        for cuts in combinations(range(1, len(self.workload.blocks)), layout.stages - 1):
                            yield Candidate(layout, levels, recomputed, offloaded, cuts)


def check_choices(devices: int, schedules: Sequence[str], levels: Sequence[int], margin: Number) -> None:
    """What a space is made of, beside a workload and its hardware.

    Raises:
        SearchError: one of them cannot be used.
    """
    _check_number("devices", devices, DEVICES)
    if not is_number(margin):
        raise SearchError(f"search: margin={shown(margin)}; give a share such as 0.05")
    if isinstance(schedules, str) or not schedules or any(name not in SHAPES for name in schedules):
        raise SearchError(f"search: schedules={shown(schedules)}; give some of {', '.join(SHAPES)}")
    if not levels or not set(levels) <= {0, 1, 2, 3}:
        raise SearchError(f"search: levels={shown(levels)}; give some of 0, 1, 2, 3")


def _check_number(what: str, value: object, most: int | None = None) -> None:
    number = integer(value)
    if number is None or number < 1 or (most is not None and number > most):
        raise SearchError(f"search: {what}={shown(value)}; give an integer from 1{f' to {most}' if most else ' on'}")


def bytes_of(size: str | Number) -> Number:
    """A number of bytes: of "24GiB", "80GB", "512 MiB", or the number itself.

    Raises:
        SearchError: it is something else.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match and match[2] in _UNITS:
        exact = Fraction(match[1]) * _UNITS[match[2]]
        if exact > 0:
            return int(exact)
    if isinstance(size, int | float | Fraction) and not isinstance(size, bool) and is_number(size, positive=True):
        return size
    raise SearchError(f"memory {shown(size)}: give bytes above 0, or text such as '24GiB' or '80GB'")


def _divisors(n: int, most: int | None = None) -> list[int]:
    limit = n if most is None else min(n, most)
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= limit]
