"""A schedule for given costs: made for the times of each stage, the links between them, and the memory of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
from lightning_piper.limits import integer, shown
from lightning_piper.schedules.actions import Action, Devices, Row, counts, one_by_one, program_of
from lightning_piper.schedules.beam import searched, shortest
from lightning_piper.schedules.interleaved import interleaved_rows
from lightning_piper.schedules.listing import Chain, Rule, chain_of, listed, rows_of
from lightning_piper.schedules.pipeline import gpipe_rows, one_f_one_b_rows, zb_h2_rows, zero_bubble_rows
from lightning_piper.schedules.timing import Number, StageCosts, peaks, timed
from lightning_piper.schedules.vshape import v_rows
from lightning_piper.schedules.zbv import zbv_rows

LISTED = 40_000  # passes that list scheduling may place, over all its rules
TUNED = 40_000  # passes that it may place while it changes the rule of one rank at a time
SEARCHED = 40_000  # steps that the search may try
WIDEST = 400  # orders that the search follows at a time
MERGED = 40_000  # passes that may be timed to find out where whole backward passes are better


def fitted(
    costs: Sequence[StageCosts],
    microbatches: int,
    ranks: Sequence[int] | None = None,
    memory: int | Sequence[int] | None = None,
    devices: Devices | None = None,
    tag: str = "PP",
    dim_name: str = "MB",
) -> list[Directive]:
    """The best schedule that is found for these costs: never longer than that of any other builder for the same stages and ranks
    that keeps within the memory.

    It is the best of all builders' rows, of list scheduling under several rules, and of a search; which passes are split is chosen
    with it. It stops as soon as nothing can be shorter. The work is bounded, whatever the times are, and the same arguments always
    give the same schedule.

    Args:
        costs: of each stage.
        microbatches: pieces of the batch, tagged `dim_name`.
        ranks: the rank of each stage; stage i is on rank i when left out. `[0, 1, 1, 0]` is a V, `[0, 1, 0, 1]` goes round twice.
        memory: of each rank, or of all, in the unit of `saved` and `static`; unlimited when left out.
        devices: of each rank, as for `gpipe`.

    Raises:
        DirectiveError: costs, counts or ranks that cannot be used; or no schedule keeps within the memory: says which rank needs
            how much at least.
    """
    rows = fitted_rows(costs, microbatches, ranks, memory)
    return program_of(rows, counts_of(costs, microbatches), devices, tag, dim_name, "fitted")


def counts_of(costs: Sequence[StageCosts], microbatches: int) -> int:
    """The number of microbatches, if both can be used.

    Raises:
        DirectiveError: names the argument.
    """
    if not isinstance(costs, list | tuple) or not costs or not all(isinstance(cost, StageCosts) for cost in costs):
        raise DirectiveError(f"fitted: costs={shown(costs)}; give a StageCosts for each stage, such as [StageCosts(1, 1, 1)] * 4")
    _, microbatches = counts("fitted", stages=len(costs), microbatches=microbatches)
    return microbatches


def fitted_rows(
    costs: Sequence[StageCosts],
    microbatches: int,
    ranks: Sequence[int] | None = None,
    memory: int | Sequence[int] | None = None,
) -> list[Row]:
    """What each rank does one after the other under `fitted`, whose arguments and errors these are."""
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
    """The shortest rows so far that keep within the memory."""

    def __init__(self, chain: Chain, limits: Sequence[int | None]) -> None:
        self._chain, self._limits = chain, limits
        self.rows = [one_by_one(*(Action(s, kind, mb) for mb in range(chain.microbatches) for s, kind in _alone(own)))
                     for own in chain.local]  # fmt: skip
        self.end: Number = timed(self.rows, chain.costs, chain.times).end

    def offer(self, rows: list[Row]) -> bool:
        """Take these, if they are better."""
        kept = peaks(rows, self._chain.costs)
        if any(limit is not None and most > limit for most, limit in zip(kept, self._limits, strict=True)):
            return False
        end = timed(rows, self._chain.costs, self._chain.times).end
        if end >= self.end:
            return False
        self.rows, self.end = rows, end
        return True


def _alone(own: Sequence[int]) -> list[tuple[int, str]]:
    """One microbatch: its forward passes, then its backward passes. Nothing keeps less."""
    return [*((s, "F") for s in own), *((s, "B") for s in reversed(own))]


def _ranks(stages: int, ranks: object) -> list[int]:
    if ranks is None:
        return list(range(stages))
    found = [integer(rank) for rank in ranks] if isinstance(ranks, list | tuple | range) else []
    numbers = [rank for rank in found if rank is not None]
    if len(numbers) != stages or len(found) != stages or sorted(set(numbers)) != [*range(len(set(numbers)))]:
        raise DirectiveError(
            f"fitted: ranks={shown(ranks)} for {stages} stages; give the rank of each stage, all from 0 on, such as [0, 1, 1, 0]"
        )
    return numbers


def _memory(ranks: int, memory: object) -> list[int | None]:
    given = memory if isinstance(memory, list | tuple) else [memory] * ranks
    found = [None if value is None else integer(value) for value in given]
    odd = [value for value, limit in zip(given, found, strict=True) if value is not None and (limit is None or limit < 0)]
    if len(found) != ranks or odd:
        raise DirectiveError(f"fitted: memory={shown(memory)} for {ranks} ranks; give bytes, an integer >= 0, or one for each rank")
    return found


def _check_room(chain: Chain, limits: Sequence[int | None]) -> None:
    """Every rank keeps all of one microbatch at a time, and more is not needed."""
    short = []
    for rank, (own, limit) in enumerate(zip(chain.local, limits, strict=True)):
        least = sum(chain.costs[s].static + chain.costs[s].saved for s in own)
        if limit is not None and least > limit:
            short.append(f"rank {rank} needs at least {least}, and has {limit}")
    if short:
        more = f", and {len(short) - 8} more ranks" if len(short) > 8 else ""
        raise DirectiveError(f"fitted: {'; '.join(short[:8])}{more}; give more memory, smaller microbatches, or shorter stages")


def _builders(chain: Chain) -> Iterator[list[Row]]:
    """The rows of all builders that have these stages on these ranks."""
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


def _rules(chain: Chain) -> Iterator[Rule]:
    """The most useful ones first."""
    stages = len(chain.ranks)
    kept = [None, stages, 2 * stages - 1, -(-stages // 2), -(-stages // 3), -(-3 * stages // 2)]
    first = [("IFW", False), ("FIW", False), ("IFW", True), ("IWF", False), ("FIW", True)]
    for patience, most, (prefer, whole) in itertools.product((0.0, 0.5, 1.0), kept, first):
        yield Rule(prefer, most, patience, whole)


def _list(chain: Chain, found: _Best) -> None:
    """List scheduling under one rule for all ranks, and from the best one on, with another rule for one rank after the other."""
    ends: dict[Rule, Number] = {}

    def tried(rules: Sequence[Rule]) -> Number:
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
    """Follow as many orders at a time as the work allows."""
    width = min(WIDEST, SEARCHED // (chain.actions * len(chain.local)))
    steps = searched(chain, width, found.end * chain.times.unit) if width > 1 else None
    if steps is not None:
        found.offer(rows_of(chain, steps))


def _changes(chain: Chain) -> Iterator[tuple[Callable[[Rule], Rule], int]]:
    """Changes of the rule of one rank, all of them of all ranks, again and again."""
    ranks = range(len(chain.local))
    most = chain.microbatches * max(map(len, chain.local))

    def kept(by: int) -> Callable[[Rule], Rule]:
        return lambda rule: rule._replace(kept=max(1, min(most, (rule.kept or most) + by)))

    orders = [lambda rule, prefer=prefer: rule._replace(prefer=prefer) for prefer in ("IFW", "FIW", "IWF")]
    waits = [lambda rule, patience=patience: rule._replace(patience=patience) for patience in (0.0, 0.5, 1.0)]
    whole = [lambda rule: rule._replace(whole=not rule.whole)]
    return itertools.cycle(itertools.product([kept(-1), kept(1), *orders, *waits, *whole, kept(-2), kept(2)], ranks))


def _merge(chain: Chain, found: _Best) -> None:
    """Join both halves of backward passes where they follow each other, stage by stage, wherever the step is shorter then."""
    stages = [s for s, cost in enumerate(chain.costs) if s and cost.whole < cost.backward_input + cost.backward_weights]
    for stage in stages[: MERGED // chain.actions]:
        rank = chain.ranks[stage]
        row: Row = []
        for (action,) in found.rows[rank]:
            last = row[-1][0] if row else None
            if action.stage == stage and action.kind == "BW" and last == Action(stage, "BI", action.microbatch):
                row[-1] = (Action(stage, "B", action.microbatch),)
            else:
                row.append((action,))
        found.offer([*found.rows[:rank], row, *found.rows[rank + 1 :]])
