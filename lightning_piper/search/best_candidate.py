"""`best_of`: the best candidate of a space, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_piper.common.limits import integer, is_number, shown
from lightning_piper.common.units import counted
from lightning_piper.errors import NoProgram, SearchError
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.bounds import INFINITE
from lightning_piper.search.branch_and_bound import Progress, Search
from lightning_piper.search.costs.workload import Workload
from lightning_piper.search.report import Found, exact_size, size
from lightning_piper.search.space import Space, bytes_of, check_choices, check_hardware
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.hardware import Hardware

OBJECTIVES = ("time", "memory")


class NothingFits(SearchError):
    """An error raised if a search finds no program that fits.

    Attributes:
        problem: The message without its fix.
        smallest: The known program that needs the least memory.
    """

    def __init__(self, problem: str, smallest: Found, planned: Number = 0) -> None:
        """Name the memory to give: the estimate of `smallest`, or the bytes of its plan (`planned`) if these are
        more."""
        estimated = max(smallest.estimate.memory)
        about = ""
        if smallest.gap and estimated >= planned:
            by = "" if math.isinf(smallest.gap) else f"up to {float(smallest.less):.1%} "
            about = f"; {by}less may be enough"
        super().__init__(
            f"{problem}. Give {exact_size(max(estimated, planned))} for each device{about} [PIPER-P002]"
        )
        self.problem, self.smallest, self.memory = problem, smallest, float(max(estimated, planned))


def best_of(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    memory: str | Number | None = None,
    objective: str = "time",
    *,
    schedules: Sequence[str] | None = None,
    levels: tuple[int, ...] = (0, 1, 2, 3),
    margin: Number = 0,
    all_devices: bool = False,
    ranks: int | None = None,
    gap: Number = 0,
    budget: int = 5000,
    progress: Progress | None = None,
) -> Found:
    """Find the candidate that fits and takes the least time for a step, or the least memory.

    Args:
        workload, hardware: The training step, and the machine that runs it.
        devices: Number of devices.
        memory: Memory of each device, in bytes or as text such as "80GiB" (default: `hardware.memory`).
        objective: "time", or "memory" for the memory of the fullest device.
        schedules: Names of the schedules to consider (default: all names in `SEARCHED`).
        levels: ZeRO levels to consider.
        margin: Memory to keep free, as a share of the estimated memory.
        all_devices: Consider only programs that use every device.
        ranks: Largest number of ranks of one pipeline. With 1 and `levels=(0,)`, each device has the whole
            model, except weights that a tensor-parallel group or experts divide. None: the number of devices.
        gap: How much worse than the best program the result may be: 0.01 for one percent.
        budget: Largest amount of work. Each estimated candidate costs one. Each branch costs one or more: the
            cost grows with its stages and microbatches. When the budget is spent, the search ends, and the
            result's `gap` says how far from the best candidate it may be. After that, the result's table
            takes at most the same amount of work again, and at most 1000. If the budget ends before a
            candidate that fits is known, the search spends it again to find the candidate with the least
            memory. If this candidate fits, the search begins again with it.
        progress: Called with the number of candidates estimated, a lower bound of all better candidates, and the
            best value so far, in seconds or bytes (infinite: none fits so far).

    Raises:
        SearchError: An argument is not valid, no program fits, or the budget ends before the search finds a
            program that fits. In the last two cases, the error names the least memory in which a program
            fits, or, if the budget ends first, the least known memory.
        NoProgram: No schedule exists for this workload on these devices.
    """
    check_asked(
        devices,
        objective,
        schedules=schedules,
        levels=levels,
        margin=margin,
        gap=gap,
        budget=budget,
        ranks=ranks,
    )
    schedules = tuple(SEARCHED if schedules is None else schedules)
    check_hardware(hardware)
    limit = bytes_of(hardware.memory if memory is None else memory)
    space = Space(workload, hardware, devices, limit, schedules, tuple(levels), margin, all_devices, ranks)
    by_memory = objective == "memory"
    search = Search(space, by_memory, gap, budget, progress)
    found = search.run()
    if found is None:
        return _smallest_first(space, by_memory, gap, budget, progress, search.complete)
    return found


def least_time(space: Space, budget: int) -> Number:
    """Return the least estimated time of a step in a space, however much memory its program needs. If the budget ends
    first, this is the least time so far; infinite if there is none.

    Args:
        space: The space; its limit of memory does not count.
        budget: Largest amount of work; see `best_of`.
    """
    found = Search(replace(space, memory=INFINITE), False, 0, budget, None).run(table=False)
    return INFINITE if found is None else found.estimate.time


def _smallest_first(
    space: Space, by_memory: bool, gap: Number, budget: int, progress: Progress | None, complete: bool
) -> Found:
    """Search again after a search that found nothing. A second search, without a limit of device memory,
    finds the candidate that needs the least memory. If this candidate fits, a third search begins with it.

    Args:
        space, by_memory, gap, budget, progress: Arguments of the first search.
        complete: Whether the first search ended before its budget, so nothing fits.

    Raises:
        SearchError: The second search found a program that does not fit, or the budget ended before it found
            one. The error names the memory of the program.
        NoProgram: No program exists, however much memory a device has.
    """
    known = progress and (lambda evaluated, _bound, _best: progress(evaluated, 0, math.inf))
    smallest = Search(replace(space, memory=INFINITE), True, 0, budget, known)
    least = smallest.run(table=False)
    if least is None and smallest.complete:
        raise _none_exists(space)
    if least is None:
        raise SearchError(
            f"search: the budget of {budget} ended before the search found a program. Give a larger budget "
            "[PIPER-P002]"
        )
    most = max(least.estimate.memory)
    if most <= space.memory:
        found = Search(space, by_memory, gap, budget, progress).run(known=least.best)
        assert found is not None
        return found
    within = size(space.memory)
    if not complete and smallest.lowest <= space.memory:
        raise NothingFits(
            f"search: the budget of {budget} ended before the search found a program that fits in {within}",
            least,
        )
    raise NothingFits(f"search: no program fits in {within}", least)


def _none_exists(space: Space) -> NoProgram:
    """Return the error of a space without candidates. Memory is not a cause, because a candidate that offloads
    nothing needs no host memory."""
    samples, blocks = space.workload.samples, len(space.workload.blocks)
    on = (
        f"that uses all {space.devices} devices"
        if space.all_devices
        else f"on {counted(space.devices, 'device')}"
    )
    fix = _fix(space)
    return NoProgram(
        f"search: no program {on} exists for {counted(samples, 'sample')} and {counted(blocks, 'block')}. {fix} "
        "[PIPER-P003]"
    )


def _fix(space: Space) -> str:
    """Return how to change the arguments of a search so that a program exists, as a sentence without its period."""
    numbers = range(space.devices, 0, -1) if space.all_devices else (space.devices,)
    for wider, words in (
        (space, []),
        (replace(space, ranks=None), ["leave ranks out"]),
        (replace(space, ranks=None, schedules=tuple(SEARCHED)), ["leave schedules and ranks out"]),
    ):
        found = next((n for n in numbers if _some_program(replace(wider, devices=n))), None)
        if found is not None:
            fewer = [f"give {counted(found, 'device')}"] if found != space.devices else []
            fix = " and ".join([*words, *fewer])
            return fix[0].upper() + fix[1:]
        others = [name for name in SEARCHED if _some_program(replace(space, schedules=(name,)))]
        if wider is space and others:
            return f"Give one of these schedules: {', '.join(others)}"
    return "Give a batch with more samples"


def _some_program(space: Space) -> bool:
    return next(space.layouts(), None) is not None


def check_asked(
    devices: int,
    objective: str = "time",
    *,
    schedules: Sequence[str] | None = None,
    levels: Sequence[int] = (0,),
    margin: Number = 0,
    gap: Number = 0,
    budget: int = 1,
    ranks: int | None = None,
) -> None:
    """Check the arguments of `best_of` that do not need the workload. `search` calls this function before it
    measures the model.

    Raises:
        SearchError: An argument is not valid.
    """
    check_choices(devices, tuple(SEARCHED) if schedules is None else schedules, levels, margin)
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise SearchError(
            f"search: objective={shown(objective)} is not usable. Give one of {', '.join(OBJECTIVES)} [PIPER-P001]"
        )
    if not is_number(gap):
        raise SearchError(f"search: gap={shown(gap)} is not usable. Give a share such as 0.01 [PIPER-P001]")
    if (integer(budget) or 0) < 1:
        raise SearchError(f"search: budget={shown(budget)} is not usable. Give an integer >= 1 [PIPER-P001]")
    if ranks is not None and (integer(ranks) or 0) < 1:
        raise SearchError(
            f"search: ranks={shown(ranks)} is not usable. Give an integer >= 1, or None [PIPER-P001]"
        )
