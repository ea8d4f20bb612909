"""Modules of the kinds that people write: each trains as on one device or as under DDP, or is refused, as
docs/zoo.md says. `covering.py` chooses the trainings; `make zoo` runs all of them and writes the page.
"""

from __future__ import annotations

import pytest

from tests.groups import grouped, marked, on_demand
from tests.zoo import page
from tests.zoo.compared import LEVELS, cases, distances, mean, references, seen, verdict
from tests.zoo.covering import ZERO, covering
from tests.zoo.train import KINDS, ended, outcomes

PAGE = page.cells(page.PAGE.read_text(encoding="utf-8"))
CASES = covering(PAGE)
QUICK = [
    (name, level)
    for name, level in CASES
    if (name == "gan" and level in ("one", "replicate")) or (name == "sum" and level in ("replicate", *ZERO))
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    def run(keys):
        needed = [(name, level) for name, level in cases([*dict.fromkeys(k for k, _ in keys)], LEVELS)]
        wanted = {*keys, *((name, other) for name, level in keys for other in references(level))}
        found = outcomes([case for case in needed if case in wanted], tmp_path_factory.mktemp("zoo"))
        return {(name, level): (verdict(KINDS[name], level, found), found) for name, level in keys}

    return on_demand(grouped(CASES, QUICK, 2 * len(LEVELS)), run)


@pytest.mark.parametrize(("name", "level"), marked(CASES, QUICK))
def test_what_the_page_says(name, level, verdicts):
    (short, long), _ = verdicts((name, level))
    assert short == PAGE[name, level], long
    assert short != "differs", long


def test_the_page_has_all_kinds_and_nothing_that_differs():
    assert PAGE.keys() == {(name, level) for name in KINDS for level in LEVELS}
    assert set(PAGE.values()) <= {"proved", "verified except", "executed", "refused", "fails", "-"}


def test_the_trainings_meet_each_verdict_of_each_level():
    assert {(level, PAGE[name, level]) for name, level in CASES} == {
        (level, verdict) for (_, level), verdict in PAGE.items()
    }
    for name in KINDS:
        levels = {level for kind, level in CASES if kind == name}
        assert {"replicate", "stages"} < levels and levels & {*ZERO}
        assert "one" in levels or PAGE[name, "stages"] == PAGE[name, "one"]


def test_a_process_that_the_package_ends_has_the_error_of_the_process_that_failed_first():
    error = {"error": "PiperError: no", "known": True}
    said = "lightning_piper: rank 0 ends, because it would wait forever: the first process to fail was rank 1: ..."
    assert ended(said, [None, error]) == error
    assert ended(said, [None, {"loss": 1.0}])["error"].startswith("the process ended: lightning_piper")
    assert ended("killed", [None, error])["error"] == "the process ended: killed"


def test_another_training_shows(verdicts):
    """The mean of the replicas' losses is not their sum, which one device has of this kind."""
    _, found = verdicts(("sum", "replicate"))
    one, ddp = (mean([seen(x) for x in found["sum", level]]) for level in ("replicate", "ddp"))
    assert max(distances(one["values"], ddp["values"]).values()) > 0.1  # measured: 0.5
    assert not any(distances(one, one).values())
