"""Validation, test and prediction steps that read Python state give the results of one device, or are refused
with an error that names the state.
"""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from tests.distributed.processes import launch_trainings
from tests.groups import grouped, marked, on_demand
from tests.strategy import python_evaluated
from tests.strategy.fitting import apart
from tests.strategy.python_state import WAYS

ROWS = python_evaluated.rows()
OVER = [way for way in WAYS if way != "local"]
# Rows that train, replace tensors or keep some, and the sanity check, whose program is another one.
IN_EVERY_WAY = ("Weights", "BufferReplaced", "TrainedWhileEvaluated", "Keeps", "SanityChecking")
EVERY = [
    (name, way)
    for i, name in enumerate(ROWS)
    for j, way in enumerate(OVER)
    if name in IN_EVERY_WAY or j == i % len(OVER)
]  # all other rows take turns: their steps are captured alike everywhere
FOLLOWED = [name for name, row in ROWS.items() if row.refused is None]
KEPT = ("Appends", "Keeps")
OF_THEIR_OWN = (
    "DataloaderIdx",
    "DataloaderIdxInIf",
    "SanityChecking",
    *KEPT,
)  # captures: of each loader, and of the sanity check
CONTROLS = [*((name, "unguarded") for name in FOLLOWED if name not in OF_THEIR_OWN), ("Appends", "unkept")]
QUICK = [("SanityChecking", "PP2"), ("Attribute", "DP2"), ("BufferReplaced", "ZeRO-3"), ("Clock", "DP2"),
         ("Attribute", "unguarded"), ("Keeps", "PP2"), ("Appends", "unkept"),
         ("ReadsWhatItKeeps", "PP2"), ("AddsUp", "PP2")]  # fmt: skip
EVERY = list(dict.fromkeys([*EVERY, *(case for case in QUICK if case[1] in OVER)]))
ROUNDING = (
    1e-14  # of the largest value of a tensor: replicas sum the gradients of the training in another order
)
WRONG = 1e-3  # at least 0.2 was measured for the controls


@pytest.fixture(scope="module")
def plain():
    found = {}

    def get(name):
        if name not in found:
            found[name] = python_evaluated.evaluate(ROWS[name], None)
        return found[name]

    return get


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def run(cases):
        folder = tmp_path_factory.mktemp("evaluated")
        found = launch_trainings(
            2, python_evaluated.evaluate_all, folder, cases, limit=timedelta(seconds=800)
        )
        return {case: [rank[case] for rank in found] for case in cases}

    return on_demand(grouped(EVERY + CONTROLS, QUICK, 12), run)


def check(name, found, plain, bound):
    if (said := ROWS[name].refused) is not None:
        assert "error" in found, "it was evaluated"
        assert re.search(said, found["error"]) and found["known"], found["error"]
        return
    assert "error" not in found, found["error"]
    wanted = plain(name)
    assert len(wanted["outputs"]) > 12 and wanted["logged"]
    assert max(apart(found, wanted).values()) <= bound


@pytest.mark.parametrize("name", marked(ROWS, ["Attribute"]))
def test_in_one_process(name, plain):
    """There the module's own steps run."""
    found = python_evaluated.evaluate(ROWS[name], "local")
    if name in FOLLOWED:
        check(name, found, plain, bound=0)
    else:
        assert "error" not in found


@pytest.mark.parametrize(("name", "way"), marked(EVERY, QUICK))
def test_over_processes(name, way, ranks, plain):
    for found in ranks((name, way)):
        check(name, found, plain, ROUNDING)


@pytest.mark.parametrize(("name", "way"), marked(CONTROLS, QUICK))
def test_unguarded_steps_are_seen_to_be_wrong(name, way, ranks, plain):
    for found in ranks((name, way)):
        assert "error" not in found, found["error"]
        assert max(apart(found, plain(name)).values()) > WRONG
