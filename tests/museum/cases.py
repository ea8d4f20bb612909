"""Cases of the museum: a mistake of another system, which is seeded into the package, the check that finds it,
and what the check says. docs/museum.md has a row for each case.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from property_tests.mutations import harness
from property_tests.mutations.scenarios import SCENARIOS

# `graph`: the static check of the graph. `plans`: the static check of the plans. `execution`: the graph, executed and
# compared with one device. `training`: the plans, executed for some steps and compared with the graph.
Check = Literal["capture", "graph", "plans", "execution", "training"]
OF_LAYERS: dict[str, Check] = {"interpreter": "execution", "plans": "training"}
OF_CODES: dict[str, Check] = {
    "PIPER-C016": "capture", "PIPER-D010": "graph", "PIPER-V001": "graph", "PIPER-V003": "plans", "PIPER-V004": "plans",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Attributes:
    mutation: The mistake, by its name in `property_tests/mutations`.
    check: The check that finds it. Cheaper checks do not find it.
    said: A regular expression that the message of the check contains.
    scenario: The model and the program, by their name in `property_tests/mutations/scenarios.py`. None: those of
        the mutation.
    """

    mutation: str
    check: Check
    said: str
    scenario: str | None = None


@functools.cache
def passes_without(scenario: str) -> None:
    """Assert that no check finds anything in a scenario without a mistake."""
    harness.control(SCENARIOS[scenario])


def assert_caught(case: Case) -> None:
    """Assert that the scenario passes all checks, and that with the mistake the named check finds it."""
    mutation = harness.TABLE[case.mutation]
    name = case.scenario or mutation.scenario
    assert name is not None, f"give {case.mutation!r} a scenario"
    passes_without(name)
    with mutation.patch() as seeded:
        caught = harness.caught_on(SCENARIOS[name], mutation)
    assert seeded.hits, "the mistake was not made"
    assert caught is not None, "no check finds it"
    assert _check_of(caught) == case.check, caught
    assert re.search(case.said, caught.message), caught.message


def _check_of(caught: harness.Caught) -> Check:
    if caught.layer in OF_LAYERS:
        return OF_LAYERS[caught.layer]
    (code,) = re.findall(r"\[(PIPER-\w+)\]", caught.message)
    return OF_CODES[code]
