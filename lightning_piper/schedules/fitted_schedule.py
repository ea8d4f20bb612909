"""A schedule optimized for given costs: the times of each stage, the links between stages, and each rank's
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from lightning_piper.common.argument_names import checks_names
from lightning_piper.common.limits import integer, shown
from lightning_piper.common.units import counted
from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules.actions import Action, Devices, Row, checked_counts, one_by_one, program_of
from lightning_piper.schedules.beam import beam_steps, shortest
from lightning_piper.schedules.interleaving import interleaved_rows
from lightning_piper.schedules.list_scheduling import Chain, PassPreference, chain_of, listed, rows_of
from lightning_piper.schedules.pipeline import gpipe_rows, one_f_one_b_rows, zb_h2_rows, zero_bubble_rows
from lightning_piper.schedules.timing import Number, StageCosts, peaks, timed
from lightning_piper.schedules.vshape import v_rows
from lightning_piper.schedules.zbv import zbv_rows

# Maximum passes that list scheduling places, over all its rules. It always tries the first rule.
LISTED = 40_000
TUNED = 40_000  # maximum passes that list scheduling places while one rank's rule changes at a time
MOST_STEPS = 40_000  # maximum steps that the beam search tries
WIDEST = 400  # maximum width of the beam search
MERGED = 40_000  # maximum passes that are timed to find stages whose backward passes should be whole


@checks_names
def fitted(
    costs: Sequence[StageCosts],
    microbatches: int,
    ranks: Sequence[int] | None = None,
    memory: int | Sequence[int] | None = None,
    devices: Devices | None = None,
    tag: str = "PP",
    dim_name: str = "MB",
) -> list[Directive]:
    """Return the best schedule found for these costs.

    The candidates are the schedules of the builders without overlaps for the same stages and ranks, list
    scheduling under several rules, and a beam search. So no such builder's schedule that fits into the memory
    is shorter. Which backward passes are split is part of the choice. The function stops when no schedule can
    be shorter. Its work is bounded for all costs, and the same arguments always give the same schedule.

    Args:
        costs: The costs of each stage.
        microbatches: The number of microbatches; their tag is `dim_name`.
        ranks: The rank of each stage (default: stage i is on rank i). `[0, 1, 1, 0]` is a V, `[0, 1, 0, 1]`
            is interleaved.
        memory: The memory of each rank in the unit of `saved` and `static`: a number for all ranks, or a list
            with a number for each rank. None is unlimited (default).
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: An argument is invalid, or no schedule fits into the memory. If none fits, the message
            says how much memory each rank with too little memory needs at least.
    """
    rows = fitted_rows(costs, microbatches, ranks, memory)
    return program_of(rows, counts_of(costs, microbatches), devices, tag, dim_name, "fitted")


def counts_of(costs: Sequence[StageCosts], microbatches: int) -> int:
    """Check both arguments, and return the number of microbatches as a Python int.

    Raises:
        DirectiveError: An argument is invalid. The message names it.
    """
    if (
        not isinstance(costs, list | tuple)
        or not costs
        or not all(isinstance(cost, StageCosts) for cost in costs)
    ):
        raise DirectiveError(
            f"fitted: costs={shown(costs)}. Give a StageCosts for each stage, such as [StageCosts(1, 1, 1)] "
            "* 4 [PIPER-D022]"
        )
    _, microbatches = checked_counts("fitted", stages=len(costs), microbatches=microbatches)
    return microbatches


def fitted_rows(
    costs: Sequence[StageCosts],
    microbatches: int,
    ranks: Sequence[int] | None = None,
    memory: int | Sequence[int] | None = None,
) -> list[Row]:
    """Return the rows of the schedule that `fitted` returns as directives. `fitted` explains the arguments
    and errors."""
    microbatches = counts_of(costs, microbatches)
    where = _ranks(len(costs), ranks)
    limits = _memory(max(where) + 1, memory)
    chain = chain_of(costs, microbatches, where, limits)
    _check_room(chain, limits)
    found = _Best(chain, limits)
    for rows in _builders(chain):
        found.offer(rows)
    for improve in (_list, _search, _merge):
        if found.end * chain.times.unit > shortest(chain):
            improve(chain, found)
    return found.rows


class _Best:
    """The shortest rows so far that fit into the memory (`rows`), and the end of their step (`end`), in the
    unit of the costs."""

    def __init__(self, chain: Chain, limits: Sequence[int | None]) -> None:
        """Begin with rows that run one microbatch after the other. They fit after `_check_room`."""
        self._chain, self._limits = chain, limits
        self.rows = [
            one_by_one(
                *(Action(s, kind, mb) for mb in range(chain.microbatches) for s, kind in _one_microbatch(own))
            )
            for own in chain.local
        ]
        self.end: Number = timed(self.rows, chain.costs, chain.times).end

    def offer(self, rows: list[Row]) -> bool:
        """Keep these rows if they fit into the memory and are shorter than the rows kept so far. Return
        whether they were kept."""
        kept = peaks(rows, self._chain.costs)
        if any(limit is not None and most > limit for most, limit in zip(kept, self._limits, strict=True)):
            return False
        end = timed(rows, self._chain.costs, self._chain.times).end
        if end >= self.end:
            return False
        self.rows, self.end = rows, end
        return True


def _one_microbatch(own: Sequence[int]) -> list[tuple[int, str]]:
    """Return (stage, pass) for all passes of one microbatch on a rank with the stages `own`: forward passes,
    then whole backward passes in the opposite order."""
    return [*((s, "F") for s in own), *((s, "B") for s in reversed(own))]


def _ranks(stages: int, ranks: object) -> list[int]:
    """Return the rank of each stage. If `ranks` is None, stage i is on rank i.

    Raises:
        DirectiveError: The ranks are invalid.
    """
    if ranks is None:
        return list(range(stages))
    found = [integer(rank) for rank in ranks] if isinstance(ranks, list | tuple | range) else []
    numbers = [rank for rank in found if rank is not None]
    if len(numbers) != stages or len(found) != stages or sorted(set(numbers)) != [*range(len(set(numbers)))]:
        raise DirectiveError(
            f"fitted: ranks={shown(ranks)} for {counted(stages, 'stage')}. Give the rank of each stage, counted from 0 "
            f"without gaps, such as {shown([*range(stages)])} [PIPER-D022]"
        )
    return numbers


def _memory(ranks: int, memory: object) -> list[int | None]:
    """Return the memory of each rank; None is unlimited. A value of `memory` that is not a list applies to
    every rank.

    Raises:
        DirectiveError: A value is invalid.
    """
    given = memory if isinstance(memory, list | tuple) else [memory] * ranks
    found = [None if value is None else integer(value) for value in given]
    odd = [
        value
        for value, limit in zip(given, found, strict=True)
        if value is not None and (limit is None or limit < 0)
    ]
    if len(found) != ranks or odd:
        raise DirectiveError(
            f"fitted: memory={shown(memory)} for {counted(ranks, 'rank')}. Give an integer >= 0, or a list with one "
            "for each rank [PIPER-D022]"
        )
    return found


def _check_room(chain: Chain, limits: Sequence[int | None]) -> None:
    """Check that each rank can hold the saved values of one microbatch for all of its stages. Then some order
    fits: one microbatch after the other.

    Raises:
        DirectiveError: A rank cannot hold them.
    """
    short, needed = [], []
    for rank, (own, limit) in enumerate(zip(chain.local, limits, strict=True)):
        least = sum(chain.costs[s].static + chain.costs[s].saved for s in own)
        needed.append(least)
        if limit is not None and least > limit:
            short.append(f"rank {rank} needs memory={least}, but has {limit}")
    if short:
        more = f"; and {counted(len(short) - 8, 'more rank')}" if len(short) > 8 else ""
        raise DirectiveError(f"fitted: {'; '.join(short[:8])}{more}. Give memory={max(needed)} [PIPER-D022]")


def _builders(chain: Chain) -> Iterator[list[Row]]:
    """Yield the rows of the builders without overlaps that place these stages on these ranks."""
    stages, ranks, m = len(chain.ranks), len(chain.local), chain.microbatches
    if list(chain.ranks) == list(range(stages)):
        for rows in (gpipe_rows, one_f_one_b_rows, zero_bubble_rows, zb_h2_rows):
            yield rows(stages, m)
    elif list(chain.ranks) == [*range(ranks), *reversed(range(ranks))]:
        yield zbv_rows(ranks, m)
        yield v_rows("v_half", ranks, m)
        yield v_rows("v_min", ranks, m)
    each = stages // ranks
    if list(chain.ranks) == [*range(ranks)] * each and m % max(1, m // ranks) == 0:
        yield interleaved_rows(ranks, m, each)


def _rules(chain: Chain) -> Iterator[PassPreference]:
    """Yield rules for list scheduling, the most useful rules first."""
    stages = len(chain.ranks)
    # Limits for the passes in flight on a rank, from none to a third of the number of stages.
    kept = [None, stages, 2 * stages - 1, -(-stages // 2), -(-stages // 3), -(-3 * stages // 2)]
    first = [("IFW", False), ("FIW", False), ("IFW", True), ("IWF", False), ("FIW", True)]
    for patience, most, (prefer, whole) in itertools.product((0.0, 0.5, 1.0), kept, first):
        yield PassPreference(prefer, most, patience, whole)


def _list(chain: Chain, found: _Best) -> None:
    """Try list scheduling with one rule for all ranks. Then start from the best rule, and change the rule of
    one rank at a time. `found` gets the rows of each trial.
    """
    ends: dict[PassPreference, Number] = {}

    def tried(rules: Sequence[PassPreference]) -> Number:
        rows = rows_of(chain, listed(chain, rules))
        found.offer(rows)
        return timed(rows, chain.costs, chain.times).end

    for rule in itertools.islice(_rules(chain), max(1, LISTED // chain.actions)):
        ends[rule] = tried([rule] * len(chain.local))
    best = min(ends, key=lambda rule: ends[rule])
    end, rules = ends[best], [best] * len(chain.local)
    for other, rank in itertools.islice(_changes(chain), TUNED // chain.actions):
        changed = [*rules[:rank], other(rules[rank]), *rules[rank + 1 :]]
        time = tried(changed) if changed != rules else end
        if time < end:
            end, rules = time, changed


def _search(chain: Chain, found: _Best) -> None:
    """Run the beam search with the largest width that `WIDEST` and `MOST_STEPS` allow, and offer its rows to
    `found`. Do nothing if this width is below 2."""
    width = min(WIDEST, MOST_STEPS // (chain.actions * len(chain.local)))
    steps = beam_steps(chain, width, found.end * chain.times.unit) if width > 1 else None
    if steps is not None:
        found.offer(rows_of(chain, steps))


def _changes(chain: Chain) -> Iterator[tuple[Callable[[PassPreference], PassPreference], int]]:
    """Yield (change of a rule, rank whose rule changes) in an endless cycle: each change for every rank."""
    ranks = range(len(chain.local))
    most = chain.microbatches * max(map(len, chain.local))

    def kept(by: int) -> Callable[[PassPreference], PassPreference]:
        return lambda rule: rule._replace(kept=max(1, min(most, (rule.kept or most) + by)))

    orders = [lambda rule, prefer=prefer: rule._replace(prefer=prefer) for prefer in ("IFW", "FIW", "IWF")]
    waits = [lambda rule, patience=patience: rule._replace(patience=patience) for patience in (0.0, 0.5, 1.0)]
    whole = [lambda rule: rule._replace(whole=not rule.whole)]
    return itertools.cycle(
        itertools.product([kept(-1), kept(1), *orders, *waits, *whole, kept(-2), kept(2)], ranks)
    )


def _merge(chain: Chain, found: _Best) -> None:
    """Replace adjacent BI and BW of one microbatch by B, one stage after the other, if this shortens the
    step. Try only stages whose B takes less time than BI and BW."""
    stages = [
        s
        for s, cost in enumerate(chain.costs)
        if s and cost.whole < cost.backward_input + cost.backward_weights
    ]
    for stage in stages[: MERGED // chain.actions]:
        rank = chain.ranks[stage]
        row: Row = []
        for (action,) in found.rows[rank]:
            last = row[-1][0] if row else None
            if (
                action.stage == stage
                and action.kind == "BW"
                and last == Action(stage, "BI", action.microbatch)
            ):
                row[-1] = (Action(stage, "B", action.microbatch),)
            else:
                row.append((action,))
        found.offer([*found.rows[:rank], row, *found.rows[rank + 1 :]])
