"""`best_of`: the best candidate of a space, and what is proved of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_piper.errors import NoProgram, SearchError
from lightning_piper.limits import integer, is_number, shown
from lightning_piper.search.bounds import INFINITE
from lightning_piper.search.branching import Progress, Search
from lightning_piper.search.report import Found
from lightning_piper.search.rows import SHAPES
from lightning_piper.search.space import Space, bytes_of, check_choices
from lightning_piper.search.workload import Workload
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

OBJECTIVES = ("time", "memory")


def best_of(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    memory: str | Number | None = None,
    objective: str = "time",
    *,
    schedules: tuple[str, ...] = tuple(SHAPES),
    levels: tuple[int, ...] = (0, 1, 2, 3),
    margin: Number = 0,
    all_devices: bool = False,
    ranks: int | None = None,
    gap: Number = 0,
    budget: int = 5000,
    progress: Progress | None = None,
) -> Found:
    """The program of least time for a step, or of least memory, that fits.

    Args:
        workload, hardware: what is divided, and among what.
        devices: how many there are.
        memory: of each device, bytes or text such as "80GiB"; that of the hardware when left out.
        objective: "time", or "memory": the largest of any device.
        schedules, levels: that are considered: names of builders, levels of ZeRO, that stages may have.
        margin: share of the estimated memory to keep free beside it.
        all_devices: consider only programs that use every device.
        ranks: of one pipeline, at most: with 1, each device has the whole model. None: as many as there are devices.
        gap: how far from the best one what is found may be: 0.01 for one percent.
        budget: how much is looked at, at most: one for each candidate that is estimated, and for each branch one and more, as it
            has more stages and microbatches. What is proved by then is told.
        progress: called with the number of candidates estimated, the lowest bound of what is left, and the best so far.

    Raises:
        SearchError: an argument cannot be used; or nothing fits: says the least memory that would do.
    """
    check_asked(devices, objective, schedules=schedules, levels=levels, margin=margin, gap=gap, budget=budget, ranks=ranks)
    limit = bytes_of(hardware.memory if memory is None and isinstance(hardware, Hardware) else memory or 0)
    space = Space(workload, hardware, devices, limit, tuple(schedules), tuple(levels), margin, all_devices, ranks)
    found = Search(space, objective == "memory", gap, budget, progress).run()
    if found is not None:
        return found
    if limit == INFINITE:
        raise NoProgram(f"search: no schedule of {', '.join(schedules)} exists for this workload on {devices} devices")
    everything = Space(workload, hardware, devices, INFINITE, tuple(schedules), tuple(levels), margin, all_devices, ranks)
    least = Search(everything, True, 0, budget, None).run(table=False)
    if least is None:
        on = f"that uses all {devices} devices" if all_devices else f"on {devices} devices"
        raise NoProgram(f"search: there is no program {on}, or none fits in the {hardware.host_memory} bytes of the host")
    needed = math.ceil(max(least.estimate.memory))
    about = "" if least.gap == 0 else f", or up to {float(least.gap / (1 + least.gap)):.1%} less"
    raise SearchError(f"search: nothing fits in {limit} bytes; the least that would do is {needed} bytes of each device{about}")


def check_asked(
    devices: int, objective: str = "time", *, schedules: Sequence[str] = tuple(SHAPES), levels: Sequence[int] = (0,),
    margin: Number = 0, gap: Number = 0, budget: int = 1, ranks: int | None = None,
) -> None:  # fmt: skip
    """Can these be arguments of `best_of`?

    Raises:
        SearchError: one of them cannot.
    """
    check_choices(devices, schedules, levels, margin)
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise SearchError(f"search: objective={shown(objective)}; give one of {', '.join(OBJECTIVES)}")
    if not is_number(gap):
        raise SearchError(f"search: gap={shown(gap)}; give a share such as 0.01")
    if (integer(budget) or 0) < 1:
        raise SearchError(f"search: budget={shown(budget)}; give an integer >= 1")
    if ranks is not None and (integer(ranks) or 0) < 1:
        raise SearchError(f"search: ranks={shown(ranks)}; give an integer >= 1, or None")
