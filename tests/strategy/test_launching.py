"""Lightning starts the script once for each device. A main module that is no script is refused before
anything is started.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.directives import to_json
from lightning_piper.errors import PiperError
from lightning_piper.session.program import VARIABLE
from tests.distributed.processes import PATIENCE, launch_trainings
from tests.strategy.fitting import PROGRAM, trainer
from tests.strategy.models import MLP, vectors
from tests.strategy.replicated import dp2


def launched(monkeypatch, argv, name=None, file=None, devices=2):
    """A Trainer in a process whose main module has this name (`python -m`) or this file."""
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", main)
        patch.setattr("sys.argv", argv)
        return trainer(piper.PiperStrategy(list(PROGRAM)), devices=devices)[0]


@pytest.mark.parametrize("argv, main, says", [
    (["-c"], {}, r"`python -c`"),
    (["-c", "--rate", "1"], {}, r"`python -c`"),
    (["-"], {"file": "<stdin>"}, "the standard input"),
    ([""], {}, "the standard input"),
    (["app.pyz"], {"name": "__main__", "file": "app.pyz/__main__.py"}, r"the archive or folder 'app\.pyz'"),
    (["gone/train.py"], {"file": "gone/train.py"}, r"gone/train\.py', which does not exist .*current folder"),
])  # fmt: skip
def test_what_is_no_script(argv, main, says, monkeypatch):
    with pytest.raises(
        piper.PiperError, match=rf"{says}.*transport='local' with devices=1.*python train\.py"
    ):
        launched(monkeypatch, argv, **main)
    assert launched(monkeypatch, argv, **main, devices=1), "nothing is started"


@pytest.mark.parametrize("argv, main", [
    ([__file__], {"file": __file__}),
    ([__file__], {"name": "package.train", "file": __file__}),
    ([__file__], {"name": "package.__main__", "file": __file__}),
])  # fmt: skip
def test_scripts_and_modules(argv, main, monkeypatch):
    assert launched(monkeypatch, argv, **main).strategy.launcher is not None


def test_processes_that_something_else_starts_need_no_script(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launched(monkeypatch, ["-c"]).strategy.launcher is None


def told(rank: int, others: list[dict[str, Any]]) -> dict[int, str]:
    """Run fits in which rank 1 is told something else than rank 0. Returns the error of each rank."""
    said = {}
    for number, other in enumerate(others):
        options: dict[str, Any] = {"directives": "auto"}
        if rank == 1:
            os.environ.update(other.get("environment", {}))
            options |= {key: value for key, value in other.items() if key != "environment"}
        fit, _ = trainer(piper.PiperStrategy(**options, timeout=PATIENCE), devices=2)
        try:
            fit.fit(MLP(), vectors())
        except PiperError as error:
            said[number] = str(error)
        os.environ.pop(VARIABLE, None)
    return said


def test_all_processes_are_told_the_same(tmp_path):
    """Where they were not, one searched and the other waited elsewhere, or they ended with an error that
    named something else.
    """
    file = tmp_path / "program.json"
    file.write_text(json.dumps(to_json(PROGRAM)))
    others = [
        {"environment": {VARIABLE: str(file)}}, {"directives": dp2()}, {"verify": "off"}, {"profile": True},
        {"checkpoint": "sharded"}, {"capture": "never"},
    ]  # fmt: skip
    for said in launch_trainings(2, told, tmp_path, others):
        assert [text.split(" is ")[0] for text in said.values()] == [
            "PiperStrategy: the program",
            "PiperStrategy: the program",
            "PiperStrategy: its argument 'verify'",
            "PiperStrategy: its argument 'profile'",
            "PiperStrategy: its argument 'checkpoint'",
            "PiperStrategy: its argument 'capture'",
        ]
        assert (
            "a program from a search" in said[0]
            and "on rank 1, but it must be the same on all processes" in said[0]
        )
