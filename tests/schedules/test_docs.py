"""The pictures in docs/schedules.md show what the simulator gives."""

from __future__ import annotations

import re

import pytest

from lightning_piper import schedules
from lightning_piper.schedules.searched_schedules import SEARCHED
from tests.schedules.pictures import PATH, PICTURE, drawn, page

PAGE = PATH.read_text(encoding="utf-8")


@pytest.mark.parametrize("found", list(PICTURE.finditer(PAGE)), ids=lambda found: found["name"])
def test_pictures(found: re.Match[str]) -> None:
    assert drawn(found) == found[0], "python -m tests.schedules.pictures draws it again"


def test_every_builder_is_shown() -> None:
    builders = {*SEARCHED, "dualpipe"}
    assert builders < set(schedules.__all__)
    assert {found["name"] for found in PICTURE.finditer(PAGE)} == builders
    assert all(f"`{name}(stages, microbatches" in PAGE for name in builders)


def test_a_call_without_a_picture_gets_one() -> None:
    (text,) = (found[0] for found in PICTURE.finditer(PAGE) if found["name"] == "gpipe")
    call, chart = text.split("\n\n")
    assert page(f"## GPipe\n\n{call}\n\nText.\n") == f"## GPipe\n\n{call}\n\n{chart}\nText.\n"
    wrong = text.replace("F0-F1", "F1-F0", 1)
    assert wrong != text and page(wrong) == text
