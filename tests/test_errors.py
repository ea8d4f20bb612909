"""Every mistake that docs/errors.md lists is made, and gets the message that stands there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.errors.case import ROOT, Case, Elsewhere, portable, said
from tests.errors.page import HEAD, MOMENTS, PAGE, cases, row, test_functions
from tests.groups import marked

TEXT = PAGE.read_text(encoding="utf-8")
MADE = [case for _, case in cases() if isinstance(case, Case)]
ELSEWHERE = [case for _, case in cases() if isinstance(case, Elsewhere)]


def name(case: Case | Elsewhere) -> str:
    return re.sub(r"[^a-z0-9]+", "-", case.what.lower()).strip("-")[:70]


@pytest.mark.parametrize("case", marked(MADE, MADE[::3]), ids=name)
def test_the_message_is_what_the_page_shows(case: Case) -> None:
    assert row(case) in TEXT.splitlines(), "write the page again: python -m tests.errors.page"


@pytest.mark.parametrize("case", ELSEWHERE, ids=name)
def test_what_needs_processes_is_made_by_another_test(case: Elsewhere) -> None:
    path, _, function = case.test.partition("::")
    assert function in test_functions(path)
    # In the texts of the test, or of what it runs in processes.
    texts = [text for file in (ROOT / path).parent.glob("*.py") for text in texts_of(file)]
    assert any(case.said in text.replace("\\", "") for text in texts)
    assert row(case) in TEXT.splitlines()


@functools.cache
def texts_of(file: Path) -> list[str]:
    """Return the strings in a file. Computed parts of an f-string are skipped."""
    return [
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_the_page_has_nothing_else() -> None:
    rows = [
        line for line in TEXT.splitlines() if line.startswith("| ") and line != "| mistake | what you see |"
    ]
    assert sorted(line.partition(" | ")[0] for line in rows) == sorted(
        f"| {case.what}" for _, case in cases()
    )
    assert TEXT.startswith(HEAD) and [line[3:] for line in TEXT.splitlines() if line.startswith("## ")] == [
        m.TITLE for m in MOMENTS
    ]


def test_the_page_names_no_folder_of_who_wrote_it() -> None:
    assert str(ROOT) not in TEXT


def test_the_page_holds_no_figure_of_rounding() -> None:
    shown = "differs by {} (first.weight; rounding explains {})"
    assert portable(shown.format("5.0e-01", "4.2e-06")) == portable(shown.format("5.0e-01", "3.9e-06"))
    assert portable(shown.format("5.0e-01", "4.2e-06")) != portable(shown.format("4.9e-01", "4.2e-06"))


def test_a_mistake_that_is_none_is_noticed() -> None:
    with pytest.raises(AssertionError, match="nothing at all: no error"):
        said(Case("nothing at all", lambda: None))
    with pytest.raises(ZeroDivisionError):
        said(Case("not ours", lambda: 1 / 0))
