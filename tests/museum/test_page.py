"""docs/museum.md and the tests of the museum belong together: each row names a test, and each test has a row."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from tests.directives.test_tensor_faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/museum.md").read_text(encoding="utf-8")
TENSORS = "tests/directives/test_tensor_faults.py"
TABLE = "test_it_is_caught"  # the test of a file's table of cases
COLUMNS = 3


def rows(page: str) -> list[tuple[str, list[str]]]:
    """Return each row of the page's tables of mistakes: the file of its section, and its cells."""
    found, file = [], None
    for line in page.splitlines():
        if line.startswith("## "):
            file = None
        elif tests := re.search(r"^Tests: `([\w/.]+)`", line):
            file = tests[1]
        elif file and line.startswith("| ") and not line.startswith(("| mistake", "|---")):
            found.append((file, [cell.strip() for cell in line[1:-1].split("|")]))
    return found


def functions(file: str) -> set[str]:
    """Return the names of a file's tests."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")}


def cases(file: str) -> set[str]:
    """Return the names of a file's cases: the keys of its table, and its other tests."""
    if file == TENSORS:
        return {fault.__name__ for fault, *_ in FAULTS}
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    return {*getattr(module, "CASES", ()), *(functions(file) - {TABLE})}


def named(page: str) -> set[tuple[str, str]]:
    """Return the file and the name of each test that a row names."""
    found = set()
    for file, cells in rows(page):
        for test in re.findall(r"`([\w/.:]+)`", cells[-1]):
            path, _, name = test.rpartition("::")
            found.add((path or file, name))
    return found


def without_a_test(page: str) -> set[tuple[str, str]]:
    return {(file, name) for file, name in named(page) if name not in cases(file) | functions(file)}


def without_a_row(page: str) -> set[tuple[str, str]]:
    files = {TENSORS, *(str(p.relative_to(ROOT)) for p in Path(__file__).parent.glob("test_*.py"))}
    files -= {str(Path(__file__).relative_to(ROOT))}
    return {(file, name) for file in files for name in cases(file)} - named(page)


def test_each_row_names_a_test() -> None:
    assert all(len(cells) == COLUMNS and cells[-1] for _, cells in rows(PAGE))
    assert not without_a_test(PAGE)
    assert len(rows(PAGE)) >= 60
    assert without_a_test(PAGE.replace("`copies_step_apart`", "`copies_step`")) == {
        ("tests/museum/test_pipelines.py", "copies_step")
    }


def test_each_test_has_a_row() -> None:
    assert not without_a_row(PAGE)
    row = next(line for line in PAGE.splitlines() if "`copies_step_apart`" in line)
    assert without_a_row(PAGE.replace(row, "")) == {("tests/museum/test_pipelines.py", "copies_step_apart")}


def test_each_row_is_complete() -> None:
    assert not [cells for _, cells in rows(PAGE) if not all(cells)]


def test_threads_are_public() -> None:
    links = re.findall(r"\]\((http[^)]+)\)", PAGE)
    assert len(set(links)) >= 32
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", x) for x in links)
