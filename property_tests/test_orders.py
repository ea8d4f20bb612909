"""Random orders: either refused with the cycle that makes them impossible, or run to the same result."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

from lightning_piper import schedules
from lightning_piper.directives import Directive
from lightning_piper.errors import DirectiveError
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.testing import Spec, case
from lightning_piper.testing.equivalence import assert_same, run_interpreter, run_plans, single_device
from lightning_piper.verify.static_check import check

BUILDERS = [
    "gpipe",
    "one_f_one_b",
    "zero_bubble",
    "zb_h2",
    "interleaved_one_f_one_b",
    "zbv",
    "v_half",
    "v_min",
    "dualpipev",
    "dualpipe",
]
SPECS = {
    2: Spec(("linear", "tied"), (0, 1), exact=True),
    4: Spec(("tied", "linear", "residual", "tied"), (0, 1, 2, 3), exact=True),
}


@st.composite
def orders(draw: Any) -> tuple[int, int, list[Directive], str]:
    """A schedule in which some actions of some ranks have changed their places, or joined each other in
    overlap groups.
    """
    stages = draw(st.sampled_from([2, 4]))
    builder = draw(st.sampled_from(BUILDERS[: -1 if stages == 4 else None]))
    count = draw(st.sampled_from([4, 8])) if builder != "dualpipe" else 4
    rows = list(csv.reader(io.StringIO(schedules.to_csv(getattr(schedules, builder)(stages, count)))))
    kind = draw(st.sampled_from(["neighbors", "neighbors", "any", "shuffled"]))
    for _ in range(draw(st.integers(0, 6))):
        row = draw(st.sampled_from(rows))
        i = draw(st.integers(0, len(row) - 2))
        if kind == "shuffled":
            row[:] = draw(st.permutations(row))
        j = draw(st.integers(0, len(row) - 1)) if kind == "any" else i + 1
        if draw(st.booleans()) and i < j and "(" not in row[i] + row[j]:
            row[i] = f"({row[i]};{row.pop(j)})OVERLAP_F_B"
        else:
            row[i], row[j] = row[j], row[i]
    text = "\n".join(",".join(row) for row in rows) + "\n"
    return stages, count, schedules.from_csv(text), text


@given(drawn=orders())
def test_an_order_is_refused_or_runs(
    tally: Counter[str], drawn: tuple[int, int, list[Directive], str]
) -> None:
    stages, count, program, text = drawn
    note(text)
    one = case(SPECS[stages], count)
    dag = build_dag(one.step)
    try:
        apply_program(dag, program)
    except DirectiveError as error:
        cycle = re.search(r"this order closes a cycle: (.*). Remove or reverse", str(error))
        assert cycle, error
        steps = re.split(r" -> \((?:data|order, directive \d+)\) ", cycle[1])
        assert len(steps) > 2 and steps[0] == steps[-1], "the cycle is printed from its begin to its begin"
        tally["orders, each refused with its cycle"] += 1
        return
    complete(dag)
    check(dag, final=True)
    outcome = run_interpreter(one, dag)
    assert_same(single_device(one.spec, count, dag.microbatches() or ()), outcome, "exact")
    assert_same(outcome, run_plans(one, dag), "bitwise")
    tally["orders, each run to the result of one device"] += 1
