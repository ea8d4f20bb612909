"""Objects that functions of the package return show themselves in one short line at a Python prompt."""

from __future__ import annotations

import pytest

import lightning_piper as piper
from lightning_piper.schedules import one_f_one_b
from lightning_piper.search.comparison import ComparedTime, PredictionComparison
from lightning_piper.simulate import simulate
from tests.models import captured

LONGEST = 200  # largest number of characters


def returned() -> dict[str, object]:
    """Return an object of each class, by the text that it shows."""
    c, program = captured("mlp"), one_f_one_b(2, 2)
    compiled = piper.compile(c.module, c.batch, program)
    found = piper.search(c.module, c.batch, 2, "1GiB", hardware="h100-sxm", check="off")
    step = ComparedTime("step", 0.002, 1.5)
    compared = PredictionComparison(step, (), (), 0.002, found, False)
    return {
        "<Compiled training_step on 2 devices: 2 stages, 2 microbatches>": compiled,
        f"<Plan of device 0: {len(compiled.plans[0].instructions)} instructions, 4 samples>": compiled.plans[
            0
        ],
        "<Report: verified, 7 rewrites>": piper.verify(c.module, c.batch, program),
        "<Simulation of 2 devices: the step takes 9>": simulate(compiled.dag, compiled.plans),
        "<Proposal: one device>": found,
        "<Found: one device; of ": found.found,
        "<Workload of 1 blocks and 4 samples>": found.workload,
        "<PredictionComparison: predicted 2 ms a step, recorded 1.5 s>": compared,
    }


def test_objects_show_themselves_in_a_line() -> None:
    for text, value in returned().items():
        assert repr(value).startswith(text) and len(repr(value)) <= LONGEST


@pytest.mark.parametrize("directive", one_f_one_b(2, 2))
def test_a_directive_shows_its_fields(directive: piper.Directive) -> None:
    assert repr(directive).startswith((f"{type(directive).__name__}(filter=", "Order(filters="))
