"""Help, the version and errors of the command line come without importing torch and lightning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from lightning_piper.search.best_candidate import OBJECTIVES
from lightning_piper_cli.arguments import parser_of

ROOT = Path(__file__).parents[1]
SLOW = {"torch", "lightning", "pytorch_lightning", "lightning_piper", "numpy", "networkx"}
# Command lines, and the text that each one prints.
LINES = {
    "--version": "lightning-piper ",
    "--help": "usage: lightning-piper ",
    "check --help": "--passes",
    "search --help": "--objective {time,memory}",
    "explain --help": "NODE",
    "explain --run": "expected one argument",
    "": "the following arguments are required: command",
    "chek": "invalid choice: 'chek'",
    "check nowhere.py:module": "the following arguments are required: --batch, --directives",
    "check nowhere.py:module --batch a:b --directives p.json": "there is no file 'nowhere.py'",
    "check nowhere:module --batch a:b --directives p.json": "there is no module 'nowhere'",
    "check nowhere.inner:module --batch a:b --directives p.json": "there is no module 'nowhere'",
    "check stages.py:module --batch nowhere.py:b --directives p.json": "there is no file 'nowhere.py'",
    "check stages.py:module --batch stages.py:b --directives p": "'p' is not a program",
    "check stages:module --batch stages:b --directives nowhere:p": "there is no module 'nowhere'",
    "search stages.py --devices 2 --batch stages.py:b": "'stages.py' does not name anything to import",
}
PROBE = """
import contextlib, io, json, sys
from lightning_piper_cli import main

printed = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(line.split())
        except SystemExit:
            pass
    printed.append(out.getvalue())
print(json.dumps([printed, list(sys.modules)]))
"""


def slow(modules: Iterable[str]) -> set[str]:
    """Return the packages among `modules` that take seconds to import."""
    return {name.partition(".")[0] for name in modules} & SLOW


def test_the_command_line_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text("import torch")
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps([*LINES]),
        capture_output=True,
        text=True,
        check=True,
    )
    printed, modules = json.loads(done.stdout)
    for line, text in zip(LINES, printed, strict=True):
        assert LINES[line] in text, line
    assert not slow(modules)
    assert slow(sys.modules) >= {"torch", "lightning", "lightning_piper"}, "here, they would be noticed"


def test_the_console_script_is_the_small_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"lightning-piper": "lightning_piper_cli:main"}


def test_objectives_are_those_of_the_search() -> None:
    line = ["search", "a:b", "--batch", "a:c", "--devices", "2", "--objective"]
    assert [parser_of().parse_args([*line, name]).objective for name in OBJECTIVES] == [*OBJECTIVES]
