"""`timed` computes what the simulator computes: exact times, with messages that take time, and the number of
microbatches whose activations are kept.
"""

from __future__ import annotations

import csv
import io
import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from lightning_piper import schedules
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.schedules.actions import Action, Row
from lightning_piper.schedules.timing import StageCosts, peaks, timed
from lightning_piper.simulate import Link, Network, Simulation, simulate
from tests.simulate.programs import pipeline
from tests.simulate.test_schedules import activations

KINDS = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
BUILDERS = [
    "gpipe",
    "one_f_one_b",
    "zero_bubble",
    "zb_h2",
    "interleaved_one_f_one_b",
    "zbv",
    "v_half",
    "v_min",
]
SIZES = [(2, 3), (4, 2), (4, 4), (6, 6)]


def action(cell: str) -> Action:
    letter = next(c for c in cell if c.isalpha())
    stage, mb = cell.split(letter)
    return Action(int(stage), KINDS[letter], int(mb))


@cache
def rows_of(name: str, stages: int, microbatches: int) -> list[Row]:
    text = schedules.to_csv(getattr(schedules, name)(stages, microbatches))
    return [[(action(cell),) for cell in row] for row in csv.reader(io.StringIO(text))]


def random_costs(stages: int, seed: int, slow: int) -> list[StageCosts]:
    draw = random.Random(seed)
    return [
        StageCosts(*(Fraction(draw.randint(1, 12), draw.randint(1, 4)) for _ in range(3)),
                   transfer=Fraction(draw.randint(0, slow), 3), saved=1, saved_for_weights=1)
        for _ in range(stages)
    ]  # fmt: skip


def simulated(dag: Any, plans: Any, rows: list[Row], costs: list[StageCosts]) -> Simulation:
    """The simulation of the plans with a latency for each direction between two ranks. Stages that share a
    link must have the same latency.
    """

    def duration(chunk: Chunk) -> Any:
        cost = costs[chunk.tags["PP"]]
        whole = chunk.kind == "B" or chunk.tags["PP"] == 0
        return cost.forward if chunk.kind == "F" else cost.whole if whole else getattr(
            cost, {"BI": "backward_input", "BW": "backward_weights"}[chunk.kind])  # fmt: skip

    rank = {a.stage: r for r, row in enumerate(rows) for (a,) in row}
    links = {}
    for stage in range(len(costs) - 1):
        for pair in ((rank[stage], rank[stage + 1]), (rank[stage + 1], rank[stage])):
            links[pair] = Link(costs[stage].transfer)
    return simulate(dag, plans, duration, Network(channels=links))


def one_latency_a_link(rows: list[Row], costs: list[StageCosts]) -> list[StageCosts]:
    rank = {a.stage: r for r, row in enumerate(rows) for (a,) in row}
    first: dict[frozenset[int], Any] = {}
    return [
        replace(cost, transfer=first.setdefault(frozenset((rank[s], rank.get(s + 1, -1))), cost.transfer))
        for s, cost in enumerate(costs)
    ]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("slow", [0, 2, 40])
def test_times_are_the_simulators(name: str, stages: int, microbatches: int, slow: int) -> None:
    if name == "interleaved_one_f_one_b" and stages == 2:
        microbatches = 2
    program = pipeline(name, stages, microbatches)
    rows = rows_of(name, stages, microbatches)
    for seed in range(4):
        costs = one_latency_a_link(rows, random_costs(stages, seed, slow))
        expected = simulated(program.dag, program.plans, rows, costs)
        found = timed(rows, costs)
        assert found.end == expected.step_time and not isinstance(found.end, float)
        assert list(found.busy) == [expected.devices[r].busy for r in range(len(rows))]
        assert list(found.peak) == [activations(expected, device) for device in expected.devices]
        if len(rows) == stages:
            assert list(found.peak) == [figures.peak_in_flight for figures in expected.devices.values()]
        longer = [replace(costs[0], forward=costs[0].forward + 1), *costs[1:]]
        assert timed(rows, longer).end > found.end, "the control: another duration gives another time"


def test_floats_are_times_too() -> None:
    rows = rows_of("zbv", 4, 4)
    costs = random_costs(4, 1, 2)
    rough = [replace(c, forward=float(c.forward), transfer=float(c.transfer)) for c in costs]
    assert timed(rows, rough).end == pytest.approx(float(timed(rows, costs).end), rel=1e-12)


def test_memory_is_kept_in_two_parts() -> None:
    costs = [StageCosts(1, 1, 1, saved=10, saved_for_weights=4, static=100)] * 2
    # F F BI: 20 and 14; BW: 10. A first stage keeps all of it until its backward pass is done.
    assert timed(rows_of("gpipe", 2, 3), costs).peak == (130, 130)
    assert peaks(rows_of("zero_bubble", 2, 3), costs) == (120, 114)
    assert peaks(rows_of("zb_h2", 2, 3), costs) == (130, 118)


def test_what_cannot_run_is_refused() -> None:
    rows = [list(row) for row in rows_of("gpipe", 2, 2)]
    costs = [StageCosts(1, 1, 1)] * 2
    rows[1].reverse()
    with pytest.raises(
        DirectiveError,
        match=r"^timed: no rank can continue: rank 0 at B of stage 0, microbatch 0; rank 1 at",
    ):
        timed(rows, costs)
    with pytest.raises(
        DirectiveError, match=r"^timed: rank 1 runs stage 1, but there are costs of 1 stage only"
    ):
        timed(rows, costs[:1])
    with pytest.raises(DirectiveError, match=r"^timed: an entry of rank 0 has 2 actions"):
        timed([[(Action(0, "F", 0), Action(0, "B", 0))]], costs)


@pytest.mark.parametrize(
    ("field", "value"),
    [("forward", -1), ("backward", float("nan")), ("saved", 0.5), ("static", -1), ("transfer", "1")],
)
def test_costs_are_numbers(field: str, value: Any) -> None:
    with pytest.raises(DirectiveError, match=f"^StageCosts\\({field}="):
        StageCosts(**{"forward": 1, "backward_input": 1, "backward_weights": 1, field: value})
