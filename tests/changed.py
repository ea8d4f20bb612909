"""Which test files a change can reach, by what each file imports: `make test CHANGED=1` runs no others.

A changed file reaches what imports it, directly or through other files. A name that is taken from the package
itself, such as `piper.Place`, counts as an import of the file that defines it. The tests of a folder also depend
on the folder's helpers, because they start some of these as scripts. The test files directly in tests/ always run:
they read the code and the pages as text.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_piper"
FOLDERS = (PACKAGE, "lightning_piper_cli", "tests", "property_tests", "benchmarks", "examples")
CHANGED = "PIPER_CHANGED"  # the commit to compare with; 1: where this branch left the main branch


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the test files that no change reaches."""
    path = collection_path
    if not os.environ.get(CHANGED) or not path.is_file() or not is_test(path) or path.parent.name == "tests":
        return None
    return None if path in _reached(os.environ[CHANGED]) else True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run without tests succeed if no change reaches a test."""
    if os.environ.get(CHANGED) and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def is_test(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py"


@cache
def _reached(since: str) -> frozenset[Path]:
    try:
        return frozenset(reached(changed(since)))
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"CHANGED={since}: git does not know this commit: {error.stderr}") from error


def changed(since: str) -> set[Path]:
    """Return the Python files that differ from the commit `since`, whether these changes are committed or
    not. "1" stands for the commit at which this branch left the main branch."""
    if since == "1":
        since = git("merge-base", "HEAD", _main())[0]
    names = git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names if name.endswith(".py")}


def _main() -> str:
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main")
    return branches[-1] if branches else "HEAD"


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def reached(files: Iterable[Path]) -> set[Path]:
    """Return these files, and all files that import them directly or through other files."""
    importers, found, waiting = _importers(), set[Path](), list(files)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += importers.get(path, ())
    return found


@cache
def _importers() -> dict[Path, set[Path]]:
    found: dict[Path, set[Path]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for other in imported(path):
                found.setdefault(other, set()).add(path)
    return found


def imported(path: Path) -> set[Path]:
    """Return the files of this project on which a file depends: the files that it imports. A file of tests
    also depends on the conftest.py files above it, and a test on the helpers in its folder."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {file for name in _names(tree, path) if (file := file_of(name)) is not None}
    if "tests" in path.parts or "property_tests" in path.parts:
        above = [folder / "conftest.py" for folder in path.parents if ROOT in folder.parents]
        helpers = path.parent.glob("*.py") if is_test(path) else ()
        found |= {file for file in (*above, *helpers) if file.exists() and not is_test(file)}
    return found - {path}


def _names(tree: ast.Module, path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, and the names of the package that it takes from a short
    name.
    """
    short = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == PACKAGE:
                    short.add(alias.asname or PACKAGE)
                else:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    inside = path.relative_to(ROOT).parts[0] == PACKAGE
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in short:
            yield f"{PACKAGE}.{node.attr}"
        elif isinstance(node, ast.Constant) and not inside and f"import {PACKAGE}" in str(node.value):
            yield PACKAGE  # a script in a text also imports the package


@cache
def file_of(name: str) -> Path | None:
    """Return the file that defines a dotted name; None if the name is not in this project."""
    parts = name.split(".")
    if parts[0] not in FOLDERS:
        return None
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        if base.with_suffix(".py").is_file():
            return base.with_suffix(".py")
        if (init := base / "__init__.py").is_file():
            rest = parts[count:]
            return (_given_by(init, rest[0]) if rest else None) or init
    return None


@cache
def _given_by(init: Path, name: str) -> Path | None:
    """Return the file from which a package's `__init__` takes a name."""
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return file_of(f"{node.module}.{alias.name}")
    return None
