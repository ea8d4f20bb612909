"""Modules of the kinds that people write train as on one device, or as under DDP, or are refused: as
docs/zoo.md says.
"""

from __future__ import annotations

import pytest

from tests.groups import grouped, marked, on_demand
from tests.zoo import page
from tests.zoo.compared import LEVELS, cases, distances, mean, references, seen, verdict
from tests.zoo.train import KINDS, outcomes

ALL = [(name, level) for name in KINDS for level in LEVELS]
QUICK = [
    ("gan", "one"),
    ("gan", "replicate"),
    ("sum", "replicate"),
    ("sum", "zero3"),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    def run(keys):
        needed = [(name, level) for name, level in cases([*dict.fromkeys(k for k, _ in keys)], LEVELS)]
        wanted = {*keys, *((name, other) for name, level in keys for other in references(level))}
        found = outcomes([case for case in needed if case in wanted], tmp_path_factory.mktemp("zoo"))
        return {(name, level): (verdict(KINDS[name], level, found), found) for name, level in keys}

    return on_demand(grouped(ALL, QUICK, 2 * len(LEVELS)), run)


@pytest.mark.parametrize(("name", "level"), marked(ALL, QUICK))
def test_what_the_page_says(name, level, verdicts):
    (short, long), _ = verdicts((name, level))
    assert short == page.cells(page.PAGE.read_text(encoding="utf-8"))[name, level], long
    assert short != "differs", long


def test_the_page_has_all_kinds_and_nothing_that_differs():
    said = page.cells(page.PAGE.read_text(encoding="utf-8"))
    assert said.keys() == set(ALL)
    assert set(said.values()) <= {"proved", "verified except", "executed", "refused", "fails", "-"}


def test_another_training_shows(verdicts):
    """The mean of the replicas' losses is not their sum, which one device has of this kind."""
    _, found = verdicts(("sum", "replicate"))
    one, ddp = (mean([seen(x) for x in found["sum", level]]) for level in ("replicate", "ddp"))
    assert max(distances(one["values"], ddp["values"]).values()) > 0.1  # measured: 0.5
    assert not any(distances(one, one).values())
