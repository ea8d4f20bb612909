"""Sharded tensors under every builder of schedules, and orders that overlap the members' exchanges with
another microbatch.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_piper import Order, Place, Split, schedules
from lightning_piper.simulate import Link, Network, simulate
from tests.groups import marked
from tests.tensors import compiled_for, divided, report_of

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
BUILDERS: dict[str, tuple[Any, list[list[int]], dict[str, Any]]] = {
    "gpipe": (schedules.gpipe, PAIRS, {"microbatches": 2}),
    "one_f_one_b": (schedules.one_f_one_b, PAIRS, {"microbatches": 4}),
    "zero_bubble": (schedules.zero_bubble, PAIRS, {"microbatches": 4}),
    "interleaved": (schedules.interleaved_one_f_one_b, PAIRS[:2], {"microbatches": 4}),
    "zbv": (schedules.zbv, PAIRS[:2], {"microbatches": 4}),
    "dualpipev": (schedules.dualpipev, PAIRS[:2], {"microbatches": 8}),
    "dualpipe": (schedules.dualpipe, PAIRS, {"microbatches": 8}),
}


@pytest.mark.parametrize("sequence", marked([False, True], [True]))
@pytest.mark.parametrize("name", marked(BUILDERS, ["zero_bubble", "dualpipe"]))
def test_every_schedule_takes_them(name, sequence):
    """Also of microbatches of one sample, whose rows have no runs."""
    build, groups, about = BUILDERS[name]
    program = [*build(stages=4, devices=groups, tag="LAYER", **about), divided(groups, sequence=sequence)]
    assert report_of(program).verdict == "verified"


@pytest.mark.parametrize("attention", ["keys", "heads"])
def test_one_sample_is_cut_as_many_are(attention):
    program = [
        Place(filter={}, devices=[0, 1]),
        Split(filter={}, dim_name="MB", num_microbatches=8),
        divided([0, 1], params={}, values={"*": 1}, attention=attention),
    ]
    assert report_of(program).verdict == "verified"


def of(batch: int, kind: str) -> dict[str, Any]:
    return {"MB": batch, "PASS": kind}


@pytest.mark.parametrize("sequence", [False, True])
def test_microbatches_that_take_turns_hide_what_is_exchanged(sequence):
    begin = [
        Place(filter={}, devices=[0, 1]),
        Split(filter={}, dim_name="MB", num_microbatches=2),
        divided([0, 1], sequence=sequence),
    ]
    turns = Order(filters=[[of(0, "F"), of(1, "F")], [of(0, "B"), of(1, "B")]])
    exposed = []
    for program in (begin, [*begin, turns]):
        made = compiled_for(program)
        figures = simulate(made.dag, made.plans, {"F": 2, "B": 4}, Network(Link(latency=2)))
        exposed.append(figures.exposed_fraction)
    assert exposed[1] < exposed[0] / 2  # 1/9 of 1/3; of sequences 1/20 of 1/3
    assert report_of([*begin, turns]).verdict == "verified"
