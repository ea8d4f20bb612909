"""Steps that read Python state which changes between steps train as on one device, or are refused with an
error that names the state.
"""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from tests.distributed.processes import launch_trainings
from tests.groups import grouped, marked, on_demand
from tests.strategy import python_state
from tests.strategy.fitting import apart

ROWS = python_state.rows()
OVER = ["DP2", "PP2", "ZeRO-3"]
# One of each kind; the others test similar rows.
QUICK_APART = ["ForwardHook", "Pruning", "BufferReplaced", "BufferIsNone", "TargetReplaced", "BatchNorm",
    "GlobalStep",
               "RateOfTheScheduler", "DrawnByNumpy", "Clock", "GlobalNumber", "List", "Float"]  # fmt: skip
QUICK = [*QUICK_APART, "ParameterReplaced", "LayerReplaced", "ForwardReplaced", "Frozen", "BatchIdxInIf",
    "LogNamedByEpoch",
         "Metrics", "Cosine", "Appends", "IncrementsAGlobal", "SetsAnAttributeOfTheTrainer",
         "ReadsAGradient", "Dict", "Array", "Closure",
         "ClassAttribute", "InBackward", "Partial", "Bool", "DropoutP", "Hparams", "Dataclass", "Slots",
         "Cached"]  # fmt: skip
ROUNDING = 1e-14  # of the largest value of a tensor. Measured: 4.2e-16
QUICK_OVER = [
    (name, way) for i, name in enumerate(QUICK_APART) for way in python_state.ways(name)
    if python_state.changes_tensors(ROWS[name]) or way == OVER[i % len(OVER)]
]  # fmt: skip


def over(number, name):
    """The ways in which a row trains over processes; `test_in_one_process` trains all rows in two stages.

    Shards are other tensors than the module's, so each row that changes tensors trains with them, and beside
    that in replicas or in stages. Where no tensor is changed, a step is captured alike everywhere, and what
    captures learn all processes agree on alike: one row of each kind trains over processes.
    """
    every, row = python_state.ways(name), ROWS[name]
    if python_state.changes_tensors(row):
        return [way for way in every if way in ("ZeRO-3", OVER[number % 2])]
    if row.refused_in_pieces is not None:
        return every
    return [OVER[number % len(OVER)]] if name in QUICK else []


APART = list(
    dict.fromkeys([*QUICK_OVER, *((name, way) for i, name in enumerate(ROWS) for way in over(i, name))])
)
WRONG = 1e-3  # at least 0.01 was measured for the controls


@pytest.fixture(scope="module")
def plain():
    found = {}

    def get(name):
        if name not in found:
            found[name] = python_state.train(ROWS[name], None)
        return found[name]

    return get


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def run(cases):
        found = launch_trainings(
            2, python_state.train_all, tmp_path_factory.mktemp("state"), cases, limit=timedelta(seconds=800)
        )
        return {case: [rank[case] for rank in found] for case in cases}

    return on_demand(grouped(APART, QUICK_OVER, 30), run)


def furthest(found, wanted):
    """The largest distance; infinite if other values are logged, or if the module has other attributes."""
    try:
        return max(apart({**found, "captures": 0}, {**wanted, "captures": 0}).values())
    except AssertionError:
        return float("inf")


def check(name, way, found, plain):
    row = ROWS[name]
    if (said := row.error(way)) is not None:
        assert "error" in found, "it trained"
        assert re.search(said, found["error"], re.DOTALL) and found["known"], found["error"]
        return
    assert "error" not in found, found["error"]
    bitwise = row.microbatches == 1 and python_state.WAYS[way][1] == 1
    assert furthest(found, plain(name)) <= (0 if bitwise else ROUNDING)
    assert found["captures"] <= row.captures


def unguarded(row):
    with python_state.unguarded():
        return python_state.train(row, "local")


@pytest.mark.parametrize("name", marked([name for name, row in ROWS.items() if "local" in row.ways], QUICK))
def test_in_one_process(name, plain):
    check(name, "local", python_state.train(ROWS[name], "local"), plain)
    if ROWS[name].error("local") is None:  # what is not followed, or not changed, shows
        row = ROWS[name]
        control = python_state.train(row, None, still=True) if row.alone else unguarded(row)
        assert furthest(control, plain(name)) > WRONG


@pytest.mark.parametrize(("name", "way"), marked(APART, QUICK_OVER))
def test_over_processes(name, way, ranks, plain):
    for found in ranks((name, way)):
        check(name, way, found, plain)
