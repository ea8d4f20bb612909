"""A search finds the best of all candidates, proves it with bounds that hold, and says which candidates it
has not tried and why.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from lightning_piper.directives import Place
from lightning_piper.errors import PiperError, SearchError
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search import (
    Block,
    Candidate,
    Layout,
    Space,
    Work,
    Workload,
    best_of,
    branch_and_bound,
    bytes_of,
    proposal,
)
from lightning_piper.search.arguments import ARGUMENTS, OPTIONS, check_arguments
from lightning_piper.search.bounds import INFINITE, Cutting, bound_of
from lightning_piper.search.branch_and_bound import Search
from lightning_piper.search.choices import everything
from lightning_piper.search.coarse_bounds import Coarse
from lightning_piper.search.estimate import PLAIN, memory_of, options_of, time_of
from lightning_piper.search.inequalities import _largest
from lightning_piper.search.joint_bounds import Together
from lightning_piper.search.program_writer import write
from lightning_piper.search.proposal import search
from lightning_piper.search.rows import decisive_states, rows_of
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.session import auto_search
from lightning_piper.simulate import Link, Number
from lightning_piper.simulate.hardware import Collectives
from tests.groups import marked
from tests.search.problems import best_of_all, broken_bounds, fits, found, problem, some

CHAINS = ("gpipe", "one_f_one_b")
PARTS = 16  # parts of the set of problems; `make test` runs one of them
# Most of the time is spent on trying every candidate, so that only two of the largest problems are tried.
SMALL = [seed for seed in range(240) if problem(seed).size <= 1200 or seed in (37, 69)]


def equal(seed: int, by_memory: bool) -> bool:
    """Whether the search of a problem finds the same best value as trying every candidate."""
    space = problem(seed)
    wanted = best_of_all(space, by_memory)
    try:
        result = found(space, objective="memory" if by_memory else "time", budget=10**6)
    except SearchError as error:
        return wanted is None and "no program fits in" in str(error)
    value = max(result.estimate.memory) if by_memory else result.estimate.time
    assert result.gap == 0 and fits(space, CostModel(space), result.best)
    assert result.evaluated + sum(result.cut.values()) == result.size == space.size == sum(1 for _ in space)
    return value == wanted


@pytest.mark.parametrize("part", marked(range(PARTS), [0]))
def test_nothing_of_the_space_is_better(part: int) -> None:
    assert not [seed for seed in range(part, 200, PARTS) if seed in SMALL and not equal(seed, False)]


@pytest.mark.parametrize("part", marked(range(4), [0]))
def test_nothing_of_the_space_needs_less_memory(part: int) -> None:
    assert not [seed for seed in range(200 + part, 240, 4) if seed in SMALL and not equal(seed, True)]


def test_problems_are_of_every_kind() -> None:
    spaces = [problem(seed) for seed in range(200)]
    results = [best_of_all(space) for space in spaces[:40]]
    assert (
        sum(result is None for result in results) >= 4 and sum(result is not None for result in results) >= 20
    )
    assert sum(any("tied" in block.params for block in space.workload.blocks) for space in spaces) > 50
    assert {len(space.workload.blocks) for space in spaces} == {3, 4, 5, 6} and {
        space.devices for space in spaces
    } == {*range(1, 9)}


def test_a_bound_that_is_too_high_loses_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(branch_and_bound, "bound_of", lambda model, candidate: 2 * bound_of(model, candidate))
    monkeypatch.setattr(Cutting, "least", lambda self, low, high: (high, high))
    assert not all(equal(seed, False) for seed in SMALL[:60])


@functools.cache
def broken() -> tuple[int, int, int]:
    return broken_bounds([problem(seed, blocks=5) for seed in range(60)])


def test_bounds_are_never_above_what_they_bound() -> None:
    taken, wrong, _ = broken()
    assert taken > 10_000 and wrong == 0


def test_what_all_ranks_do_together_says_more() -> None:
    """Than the mean work of the ranks: it knows of the bubble that split backward passes leave, and of
    memory.
    """
    model = CostModel(Space(chain(8), problem(0).hardware, 4, 10**9))
    for name in ("zero_bubble", "zb_h2", "zbv", "v_half", "v_min"):
        layout = Layout(name, SEARCHED[name].per_rank[0], 4, 1, 1, 1, 4, True)
        cuts = tuple(range(8 // layout.stages, 8, 8 // layout.stages))
        candidate = Candidate(layout, (0,) * layout.stages, 0, 0, cuts)
        least = Together(model).time(layout, everything(layout, (0,)).options(), INFINITE)
        time = time_of(model, candidate)
        assert Coarse(model).time(layout) * 1.05 < least < time
        memory, _ = memory_of(model, candidate)
        scarce = Together(CostModel(replace(model.space, memory=0.8 * max(memory))))
        assert scarce.time(layout, [[(0, PLAIN)]] * layout.stages, INFINITE) > 1.02 * least


def test_weights_of_a_different_numbering_give_bounds_that_hold() -> None:
    """Twice as much would be wrong."""
    reused = wrong = close = 0
    for seed in range(0, 60, 2):
        space = replace(problem(seed, blocks=5), memory=INFINITE)
        for model, candidate in some(space, seed):
            together = Together(model)
            own = candidate.layout._replace(routed=1, groups=1)
            for k, layout in enumerate(own._replace(data_inside=inside) for inside in (True, False)):
                options = everything(layout, space.levels_of(layout)[0]).options()
                least = together.time(
                    layout, options, INFINITE, rough=bool(k)
                )  # the second takes the weights
                levels = (space.levels_of(layout)[0][-1],) * layout.stages
                time = time_of(model, Candidate(layout, levels, *candidate[2:]))
                wrong, reused, close = wrong + (least > time), reused + k, close + k * (2 * least > time)
    assert reused > 100 and wrong == 0 and close > 50


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_measured_collectives_may_be_faster_than_links_say(zero: int) -> None:
    """A bound knows of them: sums and gathers over a link of one byte a second would take longer than the
    whole step.
    """
    hardware = replace(problem(0).hardware, links=((8, searching_link(1)),), at_once=None)
    candidate = Candidate(Layout("one_f_one_b", 1, 2, 2, 1, 1, 4, True), (zero, zero), 0, 0, (2,))
    for collectives, slow in (({2: Collectives(*(Link(),) * 3)}, False), ({}, True)):
        model = CostModel(Space(chain(4, params=100), replace(hardware, collectives=collectives), 4, 10**9))
        least = Together(model).time(candidate.layout, [[(zero, PLAIN)]] * 2, INFINITE)
        assert least <= time_of(model, candidate) and (least > 100) == slow


def test_a_host_without_room_is_a_limit_too() -> None:
    """As that of a measured CPU is, whose memory is the device's. With room, something may be offloaded."""

    def least(room: int) -> float:
        hardware = replace(problem(0).hardware, host_memory=room)
        model = CostModel(Space(chain(8), hardware, 4, 100))
        with np.errstate(all="raise"):
            layout = Layout("zero_bubble", 1, 4, 1, 1, 1, 4, True)
            return Together(model).time(layout, everything(layout, (0,)).options(), INFINITE)

    assert INFINITE > least(0) == least(1) > least(10**6) > 0


@pytest.mark.parametrize(("name", "memory", "at_once", "enough"), [
    ("interleaved_one_f_one_b", 1000, 2, False),
    ("interleaved_one_f_one_b", 1000, None, True),  # an accelerator needs no additional memory for an update
    ("interleaved_one_f_one_b", 850, None, False),
    ("zbv", 850, None, True),
    ("zbv", 1000, 2, True),
])  # fmt: skip
def test_what_both_ends_share_and_its_update_need_memory(
    name: str, memory: int, at_once: int | None, enough: bool
) -> None:
    """A table of 147 bytes that the first and the last block use is whole on both ranks, unless these are
    one, and an update takes twice as much: a layout without room for it is excluded as a whole, another one
    is not.
    """
    plain = chain(8).blocks
    blocks = [
        replace(block, params={"table": 147} if k in (0, 7) else {f"{k}": 27})
        for k, block in enumerate(plain)
    ]
    hardware = replace(problem(0).hardware, at_once=at_once)
    model = CostModel(
        Space(Workload(tuple(blocks), 2, 2), hardware, 2, memory, (name,), (0,), all_devices=True)
    )
    layout = next(own for own in model.space.layouts() if own.per_rank == 2 and own.ranks == 2)
    candidates = [candidate for candidate in model.space if candidate.layout == layout]
    times = [time_of(model, candidate) for candidate in candidates if fits(model.space, model, candidate)]
    least = Together(model).time(layout, everything(layout, (0,)).options(), INFINITE)
    assert bool(times) == enough
    assert (
        least <= min(times) if enough else least > max(time_of(model, candidate) for candidate in candidates)
    )


def test_bounds_are_close() -> None:
    """The control: one percent more, and they would be wrong."""
    assert broken()[2] > 100


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_a_stage_bound_grows_with_the_stage(seed: int) -> None:
    """What the reach of a cut relies on."""
    for model, candidate in some(problem(seed, blocks=5), seed):
        for by_memory in (False, True):
            cutting = Cutting(
                model, candidate.layout, [[option] for option in options_of(candidate)], by_memory
            )
            for s in range(candidate.layout.stages):
                first = range(1) if s == 0 else range(s, 5)
                for i in first:
                    values = [cutting.stage(s, i, j) for j in range(i + 1, 6)]
                    assert (
                        values == sorted(values, key=lambda found: (not found[1], found[0])) or not by_memory
                    )
                    assert [value for value, _ in values] == sorted(value for value, _ in values)
                    assert i + 1 not in first or all(
                        cutting.stage(s, i + 1, j)[0] <= cutting.stage(s, i, j)[0] for j in range(i + 2, 6)
                    )


@pytest.mark.parametrize("seed", [198])
def test_the_stage_with_the_least_work_may_get_a_block_of_any_stage(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time() -> Number:
        best = Search(problem(seed, blocks=9), False, 0, 1, None).run(table=False)
        assert best is not None
        return best.estimate.time

    better, own = time(), Search._beside
    monkeypatch.setattr(Search, "_beside", lambda self, candidate, far: own(self, candidate, False))
    assert better < time()


def chain(blocks: int = 6, samples: int = 8, params: int = 10) -> Workload:
    work = {(1, 1): Work(Fraction(1), Fraction(1), Fraction(1), Fraction(4), Fraction(2), Fraction(1))}
    return Workload(tuple(Block(f"{k}", work, {f"{k}": params}) for k in range(blocks)), samples, 2)


def test_a_small_budget_says_how_far_it_may_be() -> None:
    space = problem(0)
    best = found(space, budget=10**6)
    some = found(space, budget=3)
    assert some.cut["left"] > 0 and some.gap > 0 and some.estimate.time <= best.estimate.time * (1 + some.gap)
    assert "from the best candidate" in str(some) and "no other candidate is better" in str(best)
    assert some.evaluated + sum(some.cut.values()) == some.size


@pytest.mark.parametrize("part", marked(range(3), [0]))
def test_a_gap_is_kept_and_saves_work(part: int) -> None:
    for seed in range(part, 30, 3):
        space = problem(seed)
        wanted = best_of_all(space)
        if wanted is not None:
            result = found(space, budget=10**6, gap=Fraction(1, 4))
            assert wanted <= result.estimate.time <= wanted * (1 + result.gap) and result.gap <= Fraction(
                1, 4
            )


def test_a_table_says_why_others_lost() -> None:
    hardware = problem(0).hardware
    result = best_of(chain(), hardware, 4, 108, schedules=CHAINS, levels=(0, 1))
    assert 20 < len(result.table) <= 25 and result.table[0].estimate.time <= result.table[-1].estimate.time
    reasons = [row.reason for row in result.table]
    assert reasons.count("") == 1 and any("too much memory" in why for why in reasons)
    text = str(result)
    assert (
        f"{result.size:,} candidates" in text
        and re.search(r"rank \d+ needs \S+ \w+ too much memory", text)
        and "bubble" in text
    )
    for row in result.table:
        assert ("too much memory" in row.reason) == (
            max(row.estimate.memory) > 108 or max(row.estimate.host) > hardware.host_memory
        )


@functools.cache
def best_choices(seed: int) -> list[Number]:
    """The twenty best times, one for each choice of everything but the cuts: for each choice, the least time
    of all its candidates, tried one after the other.
    """
    space = problem(seed)
    model, least = CostModel(space), dict[tuple[object, ...], Number]()
    for candidate in space:
        if fits(space, model, candidate):
            time = time_of(model, candidate)
            least[candidate[:4]] = min(time, least.get(candidate[:4], time))
    return sorted(least.values())[:20]


def shown(seed: int) -> tuple[list[Number], bool]:
    """The times of the candidates in the table that fit; and whether the candidates in it that do not fit are
    at most five, each faster than the best.
    """
    space = problem(seed)
    result = found(space, budget=10**6)
    model = CostModel(space)
    fitting = [row for row in result.table if fits(space, model, row.candidate)]
    over = [row for row in result.table if row not in fitting]
    assert len({row.candidate[:4] for row in fitting}) == len(fitting)
    return [row.estimate.time for row in fitting], len(over) <= 5 and all(
        row.estimate.time < result.estimate.time for row in over
    )


def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The problems whose table differs from what trying every candidate finds."""
    monkeypatch.setattr(branch_and_bound, "ALTERNATIVES", 10**6)
    wanted = {seed: best_choices(seed) for seed in range(24)}
    return [seed for seed, times in wanted.items() if times and shown(seed) != (times, True)]


def test_a_table_has_the_best_twenty_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tables(monkeypatch)


def test_a_table_without_a_second_look_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(branch_and_bound.Search, "_go_on", lambda self: None)
    assert len(tables(monkeypatch)) > 10


def test_programs_are_candidates_once() -> None:
    """With one microbatch GPipe and 1F1B are the same, with more they are not; near devices may change
    places.
    """
    layouts = list(
        Space(
            chain(3, 2), replace(problem(0).hardware, links=((8, searching_link(1)),)), 4, 10**6, CHAINS
        ).layouts()
    )
    assert {layout.schedule for layout in layouts if layout.microbatches == 1} == {"gpipe"}
    assert {layout.schedule for layout in layouts if layout.microbatches == 2} == set(CHAINS)
    assert all(layout.data_inside for layout in layouts) and any(
        layout.ranks > 1 < layout.replicas for layout in layouts
    )
    far = Space(
        chain(3, 2),
        replace(problem(0).hardware, links=((2, searching_link(9)), (8, searching_link(1)))),
        4,
        10**6,
        CHAINS,
    )
    assert not all(layout.data_inside for layout in far.layouts())
    for m in (1, 4):
        same = [
            rows_of(name, 1, 3, m).wires.steps for name in ("gpipe", "one_f_one_b", "zero_bubble", "zb_h2")
        ]
        assert (same[0] == same[1]) == (same[2] == same[3]) == (m == 1)


def test_the_bound_knows_the_bubble_of_interleaved_stages() -> None:
    """Without the spans of later stages, it is 0.72 of the time, because the first stages may be small."""
    model = CostModel(Space(chain(16), problem(0).hardware, 4, 10**9))
    layout = Layout("interleaved_one_f_one_b", 4, 4, 1, 1, 1, 4, True)
    time = time_of(model, Candidate(layout, (0,) * 16, 0, 0, tuple(range(1, 16))))
    least = Together(model).time(layout, everything(layout, (0,)).options(), INFINITE)
    assert 0.85 * time < least < time


def test_the_memory_of_ranks_counts_what_stays_for_weights() -> None:
    """If all stages recompute, only this stays. It is most in a late state, with few other values."""
    rows = rows_of("zbv", 2, 16, 32)
    for rank, kept in enumerate(rows.kept):
        stays = [sum(w for _, w in state) for _, state in kept]
        assert max(stays) == max(sum(w for _, w in state) for _, state in _largest(rows, rank))


def test_few_states_of_a_stage_decide_its_memory() -> None:
    """For any bytes of a microbatch, and each way of storing activations."""
    draw, every, decisive = random.Random(0), 0, 0
    for key in (
        ("zbv", 2, 8, 16),
        ("interleaved_one_f_one_b", 4, 4, 8),
        ("zb_h2", 1, 8, 20),
        ("v_min", 2, 6, 12),
    ):
        rows = rows_of(*key)
        for stage, rank in enumerate(rows.rank):
            own = rows.local[rank].index(stage)
            states = [(runs if runs == stage else -1, (state[own],)) for runs, state in rows.kept[rank]]
            few = decisive_states(states)
            every, decisive = every + len(set(states)), decisive + len(few)
            for _ in range(20):
                saved, again, kept = (draw.choice((0, draw.randrange(1000))) for _ in range(3))
                for nbytes in (
                    lambda runs, a, w: saved * a + kept * w,  # noqa: B023
                    lambda runs, a, w: again * a + kept * w + saved * (runs >= 0),  # noqa: B023
                    lambda runs, a, w: saved * min(a, 2) + kept * w,  # noqa: B023
                    lambda runs, a, w: saved * a,  # noqa: B023
                ):
                    found = [max(nbytes(runs, *state[0]) for runs, state in each) for each in (states, few)]
                    assert found[0] == found[1]
    assert decisive < every


def test_a_family_has_the_lowest_bounds_of_its_layouts() -> None:
    """The lowest ones exactly, so that a larger bound would be wrong."""
    families = 0
    for seed in range(40):
        space = problem(seed)
        coarse = Coarse(CostModel(space))
        for family in space.families():
            layouts, families = list(family.layouts()), families + 1
            times, memories = ([bound(own) for own in layouts] for bound in (coarse.time, coarse.memory))
            assert coarse.least_of(family) == (min(times), min(memories))
            assert space.candidates_of(family) == sum(map(space.candidates, layouts))
    assert families > 300


def test_progress_is_told_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, float, float]] = []
    result = best_of(
        chain(),
        problem(0).hardware,
        4,
        10**6,
        schedules=CHAINS,
        levels=(0,),
        progress=lambda *now: told.append(now),
    )
    assert told and [bound for _, bound, _ in told] == sorted(bound for _, bound, _ in told)
    assert told[-1][2] == float(result.estimate.time) and not capsys.readouterr().out


def test_the_space_counts_its_candidates() -> None:
    space = Space(chain(3, 2), problem(0).hardware, 2, 10**6, ("gpipe",), (0, 1))
    assert space.size == sum(1 for _ in space)
    # One rank: 3 choices of the stage, for 2 microbatches or 1. Two replicas: 2 levels, 3 choices. Two ranks:
    # 6 choices, 2 cuts.
    assert space.size == 2 * 3 + 2 * 3 + 2 * 6 * 2


@pytest.mark.parametrize("check, fails", [("static", False), ("static", True), ("off", False)])
def test_the_least_memory_is_of_the_candidate_whose_plan_needs_least(
    check: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first candidate by its estimate has a larger plan than the second. Plans of later candidates do not count,
    because their estimates are larger. And the control: the second fails its check."""
    found = best_of(chain(), problem(0).hardware, 4, 10**6, "memory", schedules=CHAINS, levels=(0,))
    (first, low), (second, more), *_ = sorted(proposal._estimated(found).items(), key=lambda item: item[1])
    plans = {first: 3 * more, second: 2 * more}

    def tried(trials: Any, candidate: Any, found: Any, check: str) -> tuple[None, float, str]:
        if fails and candidate == second:
            raise PiperError("not equivalent")
        return None, float(plans.get(candidate, 4 * more)), ""

    monkeypatch.setattr(proposal._Trials, "_tried", tried)
    trials = proposal._Trials(nn.Module(), None, cast("Any", None), check, low / 2, print)
    assert trials._enough(found) == (0 if check == "off" else 3 * more if fails else 2 * more)


def test_more_memory_is_asked_for() -> None:
    with pytest.raises(SearchError, match=r"no program fits in 20 B\. Give (\S+) bytes") as raised:
        best_of(chain(), problem(0).hardware, 2, 20, schedules=CHAINS)
    least = Fraction(str(raised.value).split("Give ")[1].split(" ")[0])
    assert max(best_of(chain(), problem(0).hardware, 2, least, schedules=CHAINS).estimate.memory) == least
    with pytest.raises(SearchError):
        best_of(chain(), problem(0).hardware, 2, least - 1, schedules=CHAINS)


def test_more_memory_that_may_be_too_much() -> None:
    """Where the budget is spent, less of it would do, by a share of what is asked for."""
    drawn, told = problem(3), []
    for budget in (1, 10**6):
        with pytest.raises(SearchError) as raised:
            best_of(drawn.workload, drawn.hardware, 4, 1, budget=budget)
        told.append(
            re.search(
                r"Give (\d+) bytes for each device(?:; up to (\S+)% less may be enough)? \[PIPER-P002\]$",
                str(raised.value),
            )
        )
    rough, exact = told
    assert rough is not None and exact is not None and exact[2] is None
    assert (
        int(rough[1]) * (1 - float(rough[2]) / 100) <= int(exact[1]) <= int(rough[1])
        and 0 < float(rough[2]) < 100
    )


def within(seed: int, less: Number = 0) -> Space:
    """A problem with just as much memory as its smallest candidate needs, or less."""
    space = replace(problem(seed), memory=10**9)
    smallest = best_of_all(space, by_memory=True)
    assert smallest is not None
    return replace(space, memory=smallest - less)


TIGHT = (6, 17, 21, 31, 54, 125, 146, 174)  # problems of which the first search finds nothing


def test_a_search_that_ends_early_does_not_say_that_nothing_fits() -> None:
    """If it knows a candidate that fits, it returns it, and what it says about the best candidate holds."""
    ends = []
    for seed in TIGHT:
        space = within(seed)
        search = Search(space, False, 0, 1, None)
        assert search.run() is None and not search.complete
        try:
            result = found(space, budget=1)
        except SearchError as error:
            least = re.search(
                r"the budget of 1 ended before the search found a program that fits in .* B\. Give (\d+) bytes for "
                r"each device(?:; .*)? \[PIPER-P002\]$",
                str(error),
            )
            assert least is not None and int(least[1]) > space.memory
            ends.append(False)
        else:
            best = best_of_all(space)
            assert best is not None and fits(space, CostModel(space), result.best)
            assert result.estimate.time * (1 - float(result.less)) <= best * (1 + 1e-9)
            ends.append(True)
        assert fits(space, CostModel(space), found(space, budget=10**6).best)
    assert {*ends} == {True, False}


def test_nothing_fits_in_less_than_the_smallest_candidate_needs() -> None:
    """The negative control: with any budget, no candidate is found."""
    for seed in TIGHT:
        space = within(seed, Fraction(1, 1000))
        with pytest.raises(SearchError, match=r"no program fits in|the budget of 1 ended"):
            found(space, budget=1)
        with pytest.raises(SearchError, match="no program fits in"):
            found(space, budget=10**6)


def test_a_budget_that_ends_with_a_bound_of_zero_proves_nothing() -> None:
    """Passes take no time, so that a bound without links is zero."""
    work = Work(0, 0, 0, 8, 2, 4)
    blocks = tuple(Block(f"block {k}", {(1, 1): work}, {f"w{k}": 16}) for k in range(8))
    hardware = replace(problem(0).hardware, links=((8, Link(1, 4)),), collectives={}, at_once=None)
    early, late = (
        best_of(Workload(blocks, 4, 2), hardware, 8, 10**6, schedules=CHAINS, all_devices=True, budget=budget)
        for budget in (1, 10**6)
    )
    assert early.estimate.time > late.estimate.time > 0
    assert early.gap == INFINITE and early.less == 1
    assert "the budget ended before any bound on better candidates" in str(early)
    assert late.gap == 0 == late.less and "no other candidate is better" in str(late)
    logged = {
        name: auto_search._proved(SimpleNamespace(found=result, refused=()))  # type: ignore[arg-type]
        for name, result in (("early", early), ("late", late))
    }
    assert "before it had a bound on the best of" in logged["early"] and "%" not in logged["early"]
    assert "none is predicted to be better" in logged["late"]


def test_axes_lie_on_the_links_of_their_distance() -> None:
    """Where neighbors are joined better, the axis that moves more is numbered first."""
    for inside, params in ((True, 10**6), (False, 0)):
        links = ((2, searching_link(10**9)), (4, searching_link(1000)))
        hardware = replace(problem(0).hardware, links=links, memory=10**9, collectives={}, at_once=None)
        layouts = [Layout("gpipe", 1, 2, 2, 1, 1, 4, order) for order in (True, False)]
        model = CostModel(Space(chain(params=params), hardware, 4, 10**9))
        times = {
            layout.data_inside: time_of(model, Candidate(layout, (0, 0), 0, 0, (3,))) for layout in layouts
        }
        assert times[inside] < times[not inside]


def searching_link(bandwidth: int) -> Any:
    return Link(0, Fraction(bandwidth))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), (" 1.5 KiB ", 1536), ("7", 7), (2.5, 2.5)],
)
def test_sizes_are_read(text: Any, nbytes: float) -> None:
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1GiB", "1 GigaByte", "0", "0GiB", "1e9", None, True, float("nan"), -3, [1]]
)
def test_other_sizes_are_refused(value: Any) -> None:
    with pytest.raises(SearchError, match="Give bytes, at most 1e15, or text"):
        bytes_of(value)


@pytest.mark.parametrize(("given", "told"), [
    ({"devices": 0}, "devices=0 is not usable. Give an integer from 1 to"),
    ({"devices": True}, "devices=True"),
    ({"devices": 2.5}, "devices=2.5"),
    ({"memory": "lots"}, "memory='lots' is not usable. Give bytes, at most 1e15"),
    ({"objective": "speed"}, "objective='speed' is not usable. Give one of time, memory"),
    ({"workload": Workload((), 4)}, "is not a Workload with blocks"),
    ({"workload": replace(chain(), samples=0)}, "samples=0"),
    ({"workload": None}, "Give a Workload"),
    ({"hardware": None}, "hardware=None is not a Hardware"),
    ({"schedules": ("fast",)}, "schedules=.*Give a list of some of gpipe"),
    ({"levels": (4,)}, "levels=.*Give a list of some of 0, 1, 2, 3"),
    ({"gap": -1}, "gap=-1"),
    ({"budget": 0}, "budget=0"),
    ({"margin": "much"}, "margin='much'"),
])  # fmt: skip
def test_arguments_are_looked_at(given: dict[str, Any], told: str) -> None:
    good: dict[str, Any] = {
        "workload": chain(),
        "hardware": problem(0).hardware,
        "devices": 2,
        "memory": 1000,
    }
    with pytest.raises(SearchError, match=told):
        best_of(**{**good, **given})


def test_a_misspelled_argument_of_a_search_is_named_with_all_arguments() -> None:
    keywords = inspect.signature(search).parameters.values()
    assert {*ARGUMENTS} == {x.name for x in keywords if x.kind is x.KEYWORD_ONLY} | {"memory", *OPTIONS}
    with pytest.raises(
        SearchError, match=r"search\(memry=\.\.\.\).*Give one of memory, .*Did you mean 'memory'"
    ):
        check_arguments(2, "time", "static", None, None, {"memry": 1})


def test_everything_that_fits_nowhere_is_told() -> None:
    hardware = problem(0).hardware
    with pytest.raises(
        SearchError, match=r"no program on 1 device exists .* one of these schedules: gpipe, one_f_one_b \["
    ):
        best_of(chain(), hardware, 1, 10**6, schedules=("zbv",))


@pytest.mark.parametrize(
    ("devices", "given", "says", "fixed"),
    [
        (7, {"all_devices": True}, r"all 7 devices exists for 4 samples .*\. Give 6 devices \[", (6, {})),
        (
            2,
            {"all_devices": True, "ranks": 1, "schedules": ("zbv",)},
            r"Give one of these schedules: gpipe, one_f_one_b",
            (2, {"schedules": ("gpipe",)}),
        ),
        (
            3,
            {"all_devices": True, "ranks": 1, "schedules": ("dualpipev",)},
            r"Leave ranks out and give 2 devices \[",
            (2, {"ranks": None}),
        ),
        (
            3,
            {"all_devices": True, "ranks": 1, "schedules": ("dualpipev",), "samples": 1},
            r"Leave schedules and ranks out \[",
            (3, {"ranks": None, "schedules": None}),
        ),
    ],
)
def test_the_fix_for_a_program_that_cannot_exist_works(
    devices: int, given: dict[str, Any], says: str, fixed: tuple[int, dict[str, Any]]
) -> None:
    fields, hardware = dict(given), problem(0).hardware
    workload = chain(samples=fields.pop("samples", 4))
    with pytest.raises(SearchError, match=says):
        best_of(workload, hardware, devices, 10**9, **fields)
    best_of(workload, hardware, fixed[0], 10**9, **{**fields, **fixed[1]})


@pytest.mark.parametrize("per_rank", [2, 3])
def test_interleaved_stages_are_written_on_their_ranks(per_rank: int) -> None:
    layout = Layout("interleaved_one_f_one_b", per_rank, 2, 1, 1, 1, 2, True)
    written = write(
        Candidate(layout, (0,) * 2 * per_rank, 0, 0, tuple(range(1, 2 * per_rank))),
        [[f"{s}"] for s in range(2 * per_rank)],
    )
    places = [directive.devices for directive in written.directives if isinstance(directive, Place)]
    assert places == [[s % 2] for s in range(2 * per_rank)]
