"""Filters: what each form selects and what is not a filter."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_piper.directives import Split
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Index, describe, matches, problem_with
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from tests.models import captured


@pytest.fixture(scope="module")
def experts() -> TrainingDAG:
    return apply_program(
        build_dag(captured("experts").step), [Split(filter={}, dim_name="MB", num_microbatches=2)]
    )


@pytest.mark.parametrize(
    ("condition", "labels"),
    [
        ({"PP": 0, "PASS": "F", "MB": 0}, ["F[PP=0,MB=0]"]),
        ({"PP": 0, "MB": [0, 1], "PASS": "F"}, ["F[PP=0,MB=0]", "F[PP=0,MB=1]"]),
        ({"PP": (0, 2), "MB": 1, "PASS": "B"}, ["B[PP=2,MB=1]", "B[PP=0,MB=1]"]),
        ({"EP": "*", "MB": 0, "PASS": "F"}, ["F[PP=1,EP=0,MB=0]", "F[PP=1,EP=1,MB=0]"]),
        ({"PP": 1, "EP": "-", "MB": 0, "PASS": "B"}, ["B[PP=1,MB=0]"]),
        ({"PP": 1, "EP": "-", "MB": 0, "PASS": "F"}, ["F[PP=1,MB=0]", "F[PP=1,MB=0]"]),
        ({"PP": 1, "EP": 1, "MB": 1}, ["F[PP=1,EP=1,MB=1]", "B[PP=1,EP=1,MB=1]"]),
        ({"PP": 2, "MB": 0, "PASS": "*"}, ["F[PP=2,MB=0]", "B[PP=2,MB=0]"]),
        ({"PP": 2, "MB": 0, "PASS": ["F", "B"]}, ["F[PP=2,MB=0]", "B[PP=2,MB=0]"]),
        ({"PP": 2, "MB": 0, "PASS": ["*"]}, ["F[PP=2,MB=0]", "B[PP=2,MB=0]"]),
        ({"PP": 3}, []),
        ({"TP": 0}, []),
        ({"MB": "-"}, []),
    ],
)
def test_what_a_filter_selects(experts: TrainingDAG, condition: Any, labels: list[str]) -> None:
    assert problem_with(condition) is None
    found = Index(experts).select(condition)
    assert [chunk.label for chunk in found] == labels
    assert [chunk.id for chunk in found] == sorted(chunk.id for chunk in found)
    assert [chunk.label for chunk in Index(experts).all if matches(condition, chunk.tags)] == labels


def test_the_empty_filter_selects_everything(experts: TrainingDAG) -> None:
    assert Index(experts).select({}) == Index(experts).all and len(Index(experts).all) == 2 * 11


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("PP=0", r"""'PP=0' is not a filter. give an object such as {"PP": 0"""),
        ([{"PP": 0}], "is not a filter"),
        (None, "None is not a filter"),
        ({0: 1}, "0 is not a tag. give a string of 1 to 100 printable characters"),
        ({"": 1}, "'' is not a tag"),
        ({"PP": []}, "tag 'PP' has an empty list. name at least one index"),
        ({"PP": -1}, "tag 'PP' has -1. give an index >= 0"),
        ({"PP": True}, "tag 'PP' has True"),
        ({"PP": 1.0}, "tag 'PP' has 1.0"),
        ({"PP": "1"}, "tag 'PP' has '1'"),
        ({"PP": None}, "tag 'PP' has None"),
        ({"PP": [0, "*"]}, r"tag 'PP' has '\*'"),
        ({"PASS": "Bi"}, r"PASS 'Bi' is unknown. give one of F, B, BI, BW, R and '\*'"),
        ({"PASS": 0}, "PASS 0 is unknown"),
        ({"PASS": "-"}, "PASS '-' is unknown"),
    ],
)
def test_what_is_no_filter(condition: Any, says: str) -> None:
    problem = problem_with(condition)
    assert problem is not None
    assert re.search(says, ". ".join(problem))


def test_a_filter_in_words() -> None:
    assert describe({"PP": 1, "MB": [0, 2], "PASS": "F"}) == "{PP: 1, MB: [0, 2], PASS: F}"
    assert describe({}) == "{}"


def test_a_long_filter_is_cut_off_in_messages() -> None:
    assert describe({"PP": 0, "PASS": "F"}) == "{PP: 0, PASS: F}"
    assert len(describe({"MB": [0] * 2000})) < 400
