"""`fitted`: what it refuses, which limits it keeps, and that its programs compute what one device computes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest

from lightning_piper.directives import Order, Place, Split, parse, to_json
from lightning_piper.errors import DirectiveError
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.schedules import StageCosts, fitted
from lightning_piper.schedules.fitted_schedule import fitted_rows
from lightning_piper.schedules.pipeline import one_f_one_b_rows, zb_h2_rows, zero_bubble_rows
from lightning_piper.schedules.timing import timed
from lightning_piper.testing.equivalence import assert_same, run_interpreter, run_plans
from lightning_piper.verify.static_check import check
from tests.groups import marked
from tests.schedules.test_builders import chain, single

EVEN = StageCosts(1, 1, 1, saved=1, saved_for_weights=1)
JOINT = StageCosts(3, 3, 3, Fraction(7, 2), saved=1, saved_for_weights=1)
V, LOOP = [0, 1, 1, 0], [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "memory"), [(None, None), (None, 2), (V, None), (V, 2), (LOOP, 3), ([0, 0, 1, 1], [4, 2])]
)
@pytest.mark.parametrize("cost", [EVEN, JOINT])
@pytest.mark.parametrize("microbatches", marked([1, 3, 8], [3]))
def test_the_result_is_that_of_one_device(
    ranks: list[int] | None, memory: Any, cost: StageCosts, microbatches: int
) -> None:
    """Bit by bit, after the static check, and without a deadlock."""
    one = chain(4, microbatches)
    program = fitted([cost] * 4, microbatches, ranks, memory)
    dag = apply_program(build_dag(one.step), program)
    complete(dag)
    check(dag, final=True)
    check_plans(compile_plans(dag))
    outcome = run_interpreter(one, dag)
    assert_same(single(one, microbatches), outcome, "bitwise")
    assert_same(outcome, run_plans(one, dag), "bitwise")


PLACED: list[tuple[list[int] | None, int]] = [
    (None, 3), ([0, 1, 2, 2, 1, 0], 2), ([0, 1, 2, 0, 1, 2], 4), ([0, 0, 1, 1, 2, 2], 3)
]  # fmt: skip
WITHIN = [(ranks, memory, microbatches) for ranks, memory in PLACED for microbatches in (1, 2, 7)]


@pytest.mark.parametrize(
    ("ranks", "memory", "microbatches"),
    marked(WITHIN, [case for case in WITHIN if case[2] == 2 or case[1] == 2]),
)
def test_each_pass_is_there_once_within_the_memory(
    ranks: list[int] | None, memory: int, microbatches: int
) -> None:
    costs = [StageCosts(1 + s % 2, 2, 1, 3 - Fraction(s, 5), 1, 1, Fraction(1, 3)) for s in range(6)]
    rows = fitted_rows(costs, microbatches, ranks, memory)
    assert max(timed(rows, costs).peak) <= memory
    for stage in range(6):
        own = [action for row in rows for (action,) in row if action.stage == stage]
        passes = {
            kind: sorted(a.microbatch for a in own if a.kind == kind) for kind in ("F", "B", "BI", "BW")
        }
        assert passes["F"] == [*range(microbatches)]
        assert passes["BI"] == passes["BW"] or stage == 0
        assert sorted(passes["B"] + passes["BW"]) == [*range(microbatches)]


def test_what_is_known() -> None:
    """One rank has no bubble; even stages have that of ZB-H1; and a program is placed as it was said."""
    assert timed(fitted_rows([EVEN], 5), [EVEN]).end == 15
    assert timed(fitted_rows([EVEN] * 3, 5, [0, 0, 0]), [EVEN] * 3).end == 45
    assert timed(fitted_rows([EVEN] * 4, 8), [EVEN] * 4).end == 3 * 8 + 3
    program = fitted([EVEN] * 4, 2, V, devices=[[0, 1], [2, 3]], tag="STAGE", dim_name="UB")
    assert [p.devices for p in program if isinstance(p, Place)] == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert Split(filter={}, dim_name="UB", num_microbatches=2) in program and isinstance(program[-1], Order)
    assert parse(to_json(program)) == program
    assert program == fitted([EVEN] * 4, 2, V, devices=[[0, 1], [2, 3]], tag="STAGE", dim_name="UB"), (
        "it is always the same"
    )


def test_memory_decides() -> None:
    """Less memory, longer steps; and with enough of it, as if it had no end."""
    costs = [EVEN] * 4
    times = [timed(fitted_rows(costs, 8, memory=memory), costs).end for memory in (1, 2, 3, 4, 8)]
    assert times == sorted(times, reverse=True) and times[0] > times[1] > times[2] > times[3]
    assert times[-1] == timed(fitted_rows(costs, 8), costs).end


def test_whole_passes_are_taken_where_they_save_time() -> None:
    """Both forms in one schedule: halves where another stage waits for the first one, whole passes
    elsewhere.
    """
    costs = [JOINT] * 2
    found = fitted_rows(costs, 6)
    assert {action.kind for (action,) in found[1]} == {"F", "B", "BI", "BW"}
    for other in (one_f_one_b_rows(2, 6), zero_bubble_rows(2, 6), zb_h2_rows(2, 6)):
        assert timed(found, costs).end < timed(other, costs).end
    dear = [StageCosts(3, 3, 3, 7)] * 2
    assert "B" not in {action.kind for (action,) in fitted_rows(dear, 6)[1]}, (
        "the control: whole passes that cost more"
    )


def test_slow_links_change_the_order() -> None:
    slow = [StageCosts(1, 1, 1, transfer=4)] * 2
    found = fitted_rows(slow, 6)
    assert found != fitted_rows([EVEN] * 2, 6)
    assert timed(found, slow).end < timed(fitted_rows([EVEN] * 2, 6), slow).end


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], 4), "costs=[]. Give a StageCosts for each stage, such as [StageCosts(1, 1, 1)] * 4"),
        (([1, 2], 4), "costs=[1, 2]. Give a StageCosts"),
        (([EVEN] * 2, 0), "microbatches=0. Give an integer >= 1"),
        (([EVEN] * 1000, 1000), "1,000 stages with 1,000 microbatches. Give at most 100 microbatches"),
        (
            ([EVEN] * 2, 4, [0, 2]),
            "ranks=[0, 2] for 2 stages. Give the rank of each stage, counted from 0 without gaps, such as "
            "[0, 1] [",
        ),
        (([EVEN] * 2, 4, [0]), "ranks=[0] for 2 stages"),
        (([EVEN] * 2, 4, [0, 10**30]), f"ranks=[0, {10**30}] for 2 stages"),
        (
            ([EVEN] * 2, 4, None, -1),
            "memory=-1 for 2 ranks. Give an integer >= 0, or a list with one for each rank",
        ),
        (([EVEN] * 2, 4, None, [1]), "memory=[1] for 2 ranks"),
        (
            ([StageCosts(1, 1, 1, saved=10, static=7)] * 4, 4, V, [34, 33]),
            "rank 1 needs memory=34, but has 33. Give memory=34",
        ),
        (
            ([StageCosts(1, 1, 1, saved=10)] * 20, 4, None, 9),
            "rank 0 needs memory=10, but has 9; rank 1 needs",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(DirectiveError, match=f"^fitted: {re.escape(says)}"):
        fitted(*arguments)


def test_the_least_memory_is_enough() -> None:
    cost = StageCosts(1, 1, 1, saved=10, saved_for_weights=30, static=7)
    assert timed(fitted_rows([cost] * 4, 3, V, 34), [cost] * 4).peak == (34, 34)


def test_names_and_devices_are_checked() -> None:
    with pytest.raises(DirectiveError, match=r"^fitted: devices=\[0\] does not fit 2 ranks"):
        fitted([EVEN] * 2, 2, devices=[0])
    with pytest.raises(DirectiveError, match=r"^fitted: tag and dim_name are both 'PP'"):
        fitted([EVEN] * 2, 2, tag="PP", dim_name="PP")
