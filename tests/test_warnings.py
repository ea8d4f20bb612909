"""docs/warnings.md has every warning of the package, in the package's words; docs/troubleshooting.md quotes
messages in these.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_piper

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGE = Path(lightning_piper.__file__).parent
PAGE = (ROOT / "docs/warnings.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<words>[^`]+)` \|", re.MULTILINE)


def literal(node: ast.expr) -> str:
    """Return the words of a string in the source, with a gap for each value in it; empty if the expression is
    not a string.
    """
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]


def warned() -> Iterator[str]:
    """Yield the texts in calls that warn, without deprecations, which the page describes together."""
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in ("warn", "rank_zero_warn") or "DeprecationWarning" in ast.unparse(node):
                continue
            text = literal(node.args[0])
            if text and not text.startswith("\0\0"):  # its own words come from another text
                yield text


def pattern(words: str) -> re.Pattern[str]:
    parts = filter(None, (part.strip() for part in words.split("…")))
    return re.compile(".*".join(map(re.escape, parts)), re.DOTALL)


@cache
def texts() -> frozenset[str]:
    return frozenset(
        literal(node) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.expr)
    )


def missing(page: str) -> tuple[list[str], list[str]]:
    """Return the rows whose words are not in the package, and the warnings without a row."""
    rows = {words: pattern(words) for words in ROW.findall(page)}
    stale = [words for words, row in rows.items() if not any(row.search(text) for text in texts())]
    return stale, [text for text in warned() if not any(row.search(text) for row in rows.values())]


def test_each_row_is_a_warning_and_each_warning_has_a_row() -> None:
    assert missing(PAGE) == ([], [])


def test_other_words_and_a_row_too_few_are_noticed() -> None:
    stale, unlisted = missing(
        PAGE.replace("`the last checkpoint is not complete: …`", "`the last checkpoint is not late: …`")
    )
    assert stale == ["the last checkpoint is not late: …"] and len(unlisted) == 1


def test_messages_in_troubleshooting_are_the_packages() -> None:
    quoted = re.findall(
        r"`([^`\n]*…[^`\n]*)`", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    )
    quoted = [words for words in quoted if words != "…"]
    assert len(quoted) > 8
    known = [*texts(), *(ROOT / "docs/errors.md").read_text(encoding="utf-8").splitlines()]
    assert [words for words in quoted if not any(pattern(words).search(text) for text in known)] == []
