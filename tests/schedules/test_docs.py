"""The pictures in docs/schedules.md show what the simulator gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_piper import schedules
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.simulate import simulate
from lightning_piper.viz import text_chart
from tests.simulate.programs import pipeline

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
PICTURE = re.compile(r"    (?P<name>\w+)\((?P<stages>\d+), (?P<microbatches>\d+)\)\n\n(?P<chart>(    .*\n)+)")


def picture(name: str, stages: int, microbatches: int) -> str:
    program = pipeline(name, stages, microbatches)
    halves = {"BW[PP=0]": 2} if any(c.label.startswith("BW[PP=0") for c in program.dag.nodes.values()) else {}
    result = simulate(program.dag, program.plans, {"F": 1, "B": 2, "BI": 1, "BW": 1, **halves})
    return "".join(f"    {line}\n" for line in text_chart(result, width=110).splitlines())


@pytest.mark.parametrize("found", list(PICTURE.finditer(PAGE)), ids=lambda found: found["name"])
def test_pictures(found: re.Match[str]) -> None:
    assert picture(found["name"], int(found["stages"]), int(found["microbatches"])) == found["chart"]


def test_every_builder_is_shown() -> None:
    builders = {*SEARCHED, "dualpipe"}
    assert builders < set(schedules.__all__)
    assert {found["name"] for found in PICTURE.finditer(PAGE)} == builders
    assert all(f"`{name}(stages, microbatches" in PAGE for name in builders)
