"""docs/errors.md, which `python -m tests.errors.page` writes from the mistakes."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from tests.errors import (
    applying,
    building,
    capturing,
    checking,
    commands,
    dividing,
    launching,
    loading,
    running,
    tensors,
)
from tests.errors.case import ROOT, TRAIN, Case, Cases, Elsewhere, said

MOMENTS: list[ModuleType] = [
    building,
    capturing,
    applying,
    dividing,
    tensors,
    checking,
    launching,
    running,
    loading,
    commands,
]
CODE = re.compile(r"\s\[(PIPER-[A-Z]\d{3})\]$")
PAGE = ROOT / "docs" / "errors.md"
HEAD = """# Errors

This page lists mistakes by the moment at which they show, with the message that you see. [Troubleshooting](troubleshooting.md)
starts from symptoms, and [warnings](warnings.md) lists all warnings. The tests make each of these mistakes, and
`python -m tests.errors.page` writes this page from the messages.

Errors that the package raises on purpose are subclasses of `piper.PiperError`. Only methods of the training DAG, in a directive of
your own, raise `ValueError`. A message says what is wrong, where (the index of the directive, the field, the line of your code,
the parameter, the rank), and what to do. It has a code, such as `[PIPER-D004]`.
[Error codes](codes.md) explains each code. `…` stands for text that is left out.
"""


@cache
def message(case: Case) -> tuple[str, str]:
    return said(case)


def cases() -> Iterator[tuple[ModuleType, Case | Elsewhere]]:
    for moment in MOMENTS:
        found: Cases = moment.CASES
        for case in found:
            yield moment, case


def row(case: Case | Elsewhere) -> str:
    error, text = (case.error, f"… {case.said} …") if isinstance(case, Elsewhere) else message(case)
    text, code = CODE.sub("", text), CODE.search(text)
    shown = "<br>".join(_code(line) for line in text.splitlines())
    if code is not None:
        shown += f" [{code[1]}](codes.md#{code[1].lower()})"
    return f"| {case.what} | {'' if error == 'CommandLine' else f'`{error}`: '}{shown} |"


def _code(text: str) -> str:
    """Return a line as code in a cell of a table."""
    mark = "``" if "`" in text else "`"
    pad = " " if "`" in (text[:1], text[-1:]) else ""
    return f"{mark}{pad}{text.strip()}{pad}{mark}".replace("|", "\\|")


def page() -> str:
    parts = [HEAD]
    for moment in MOMENTS:
        rows = "\n".join(row(case) for case in moment.CASES)
        intro = moment.INTRO.replace("{TRAIN}", TRAIN.replace("{line}", "...  # here").rstrip())
        parts.append(f"## {moment.TITLE}\n\n{intro}\n\n| mistake | what you see |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def test_functions(path: str) -> set[str]:
    """The tests of a file."""
    return {
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }


test_functions.__test__ = False  # type: ignore[attr-defined]

if __name__ == "__main__":
    logging.disable(logging.INFO)
    PAGE.write_text(page(), encoding="utf-8")
