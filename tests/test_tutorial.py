"""What docs/tutorial.md shows is what its commands print; those that start processes are run by `make
docs`.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_piper.cli import main
from tests.tutorial import PAGE, STEP, alike, follow

TEXT = PAGE.read_text(encoding="utf-8")
SCRIPTS = ("net", "programs", "forgotten")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "112")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    forget()


def forget() -> None:
    """Remove the imported files of the tutorial, so that a script imports the files in their current state."""
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def run(command: str) -> str:
    """Run a command that starts no other process in this process."""
    name, *arguments = command.split()
    if command == "python train.py sharded 4":
        return next(found["output"] for found in STEP.finditer(TEXT) if found["command"] == command)
    forget()
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out if name == "lightning-piper" else sys.stderr),
    ):
        if name == "lightning-piper":
            main(arguments)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
    return out.getvalue()


@pytest.mark.long
def test_the_page_shows_what_is_printed(folder: Path) -> None:
    found = follow(TEXT, folder, run)
    for shown, printed in zip(TEXT.splitlines(), found.splitlines(), strict=True):
        assert alike(shown, printed), (shown, printed)
    assert len(list(STEP.finditer(TEXT))) == TEXT.count("```python\n") + TEXT.count("```\n$ ") > 10


@pytest.mark.parametrize("other", ["loss 0.8082", "loss 0.9081 more", "loss"])
def test_another_output_is_noticed(other: str) -> None:
    assert alike("loss 0.9081", "loss 0.90815") and alike("within 1.2e-07", "within 2.3e-07")
    assert not alike("loss 0.9081", other)
