"""An F and a B that overlap have one duration together, which the table gives separately."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_piper.directives import Order, Split
from lightning_piper.errors import SimulationError
from lightning_piper.plan import compile_plans
from lightning_piper.simulate import Simulation, simulate
from tests.dags import b, f
from tests.plan.programs import dag_of
from tests.simulate.programs import chain


def run(durations: dict[str, Any], *filters: Any) -> Simulation:
    order = Order(filters=filters or [f(0, 0), [f(0, 1), b(0, 0)], b(0, 1)])
    dag = dag_of(chain(1, 2), [Split(filter={}, dim_name="MB", num_microbatches=2), order])
    return simulate(dag, compile_plans(dag), durations)


def test_a_pair_takes_its_own_time() -> None:
    assert run({"F": 2, "B": 3}).step_time == 10
    result = run({"F": 2, "B": 3, "F&B": 4})
    assert result.step_time == 9
    ends = {span.label: (span.start, span.end) for span in result.timeline if span.kind in "FB"}
    # The second of a pair has no time of its own: both are done together.
    assert sorted(ends[label][1] for label in ("F[PP=0,MB=1]", "B[PP=0,MB=0]")) == [6, 6]
    assert ends["F[PP=0,MB=0]"] == (0, 2) and ends["B[PP=0,MB=1]"] == (6, 9)


@pytest.mark.parametrize(
    "filters",
    [
        [f(0, 0), f(0, 1), b(0, 0), b(0, 1)],  # no group
        [[f(0, 0), f(0, 1)], [b(0, 0), b(0, 1)]],  # groups without a pair of F and B
        [f(0, 0), [f(0, 1), b(0, 0), b(0, 1)]],  # a group of three passes
    ],
)
def test_nothing_else_is_a_pair(filters: list[Any]) -> None:
    assert run({"F": 2, "B": 3, "F&B": 4}, *filters).step_time == 10


def test_a_measured_chunk_is_no_pair() -> None:
    dag = dag_of(
        chain(1, 2),
        [Split(filter={}, dim_name="MB", num_microbatches=2), Order(filters=[f(0, 0), [f(0, 1), b(0, 0)]])],
    )
    node = next(iter(c.id for c in dag.nodes.values() if c.label == "F[PP=0,MB=1]"))
    assert simulate(dag, compile_plans(dag), {"F": 2, "B": 3, "F&B": 4, f"%{node}": 1}).step_time == 9


def test_a_pairs_duration_is_checked() -> None:
    with pytest.raises(
        SimulationError, match=r"durations: 'F&B' is -1. Give 0, or a number from 1e-15 to 1e15"
    ):
        run({"F": 2, "B": 3, "F&B": -1})
