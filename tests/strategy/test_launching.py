"""Lightning starts the script once for each device: what is no script is refused before anything is started."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, trainer


def launched(monkeypatch, argv, name=None, file=None, devices=2):
    """A Trainer in a process whose main module is of this name (`python -m`) or file."""
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
    (["gone/train.py"], {"file": "gone/train.py"}, r"gone/train\.py', which is not there .*current folder"),
])  # fmt: skip
def test_what_is_no_script(argv, main, says, monkeypatch):
    with pytest.raises(piper.PiperError, match=rf"{says}.*transport='local' with devices=1.*python train\.py"):
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
