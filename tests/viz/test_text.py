"""The text chart: golden pictures."""

from __future__ import annotations

from fractions import Fraction
from textwrap import dedent

from lightning_piper.simulate import Link, Network, simulate
from lightning_piper.viz import text_chart
from tests.plan.programs import place, split
from tests.simulate.programs import captured, compiled, pipeline


def chart(schedule: str, stages: int, microbatches: int, width: int, network: Network | None = None) -> str:
    program = pipeline(schedule, stages, microbatches)
    return text_chart(simulate(program.dag, program.plans, network=network), width)


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_gpipe() -> None:
    assert chart("gpipe", 3, 4, 60) == picture("""
        device  one column is 0.3333, the step takes 18
        0       F0-F1-F2-F3-..................B0----B1----B2----B3----
        1       ...F0-F1-F2-F3-.........B0----B1----B2----B3----......
        2       ......F0-F1-F2-F3-B0----B1----B2----B3----............
        """)


def test_one_f_one_b() -> None:
    assert chart("one_f_one_b", 3, 4, 40) == picture("""
        device  one column is 0.5, the step takes 18
        0       F0F1F2........B0--F3B1--..B2--..B3--
        1       ..F0F1....B0--F2B1--F3B2--..B3--....
        2       ....F0B0--F1B1--F2B2--F3B3--........
        """)


def test_names_that_do_not_fit_are_left_out() -> None:
    """Twelve microbatches: `F10` needs three columns."""
    assert (
        chart("gpipe", 1, 12, 40).splitlines()[1][8:].strip()
        == "F" * 12 + "".join(f"B{i}" for i in range(10)) + "B-B-"
    )


def test_a_step_longer_than_the_chart_is_wide() -> None:
    _, *rows = chart("one_f_one_b", 4, 32, 60).splitlines()
    assert {len(row) for row in rows} == {8 + 60}


def test_equal_work_looks_equal_at_times_between_columns() -> None:
    _, *rows = chart("gpipe", 3, 4, 60, Network(Link(Fraction(1, 4)))).splitlines()
    assert all("F0-F1-F2-F3-" in row and "B0----" in row for row in rows)


def test_streams_and_stages_are_named_where_there_are_several() -> None:
    first, second = place(captured("mlp").step, 1)
    program = compiled("mlp", [first, {**second, "stream": "side"}, *split(2)])
    assert text_chart(simulate(program.dag, program.plans), 18) == picture("""
        device     one column is 0.5, the step takes 9
        0 compute  F0F1......B0--B1--
        0 side     ..F0F1B0--B1--....
        """)
    together = compiled("mlp", [first, second, *split(2)])
    assert "F0.0-F1.0-F0.1-F1.1-B1.0------" in text_chart(simulate(together.dag, together.plans), 60)


def test_a_step_without_time() -> None:
    program = pipeline("gpipe", 2, 2)
    assert text_chart(simulate(program.dag, program.plans, {"F": 0, "B": 0})) == "no chunk takes any time"
