"""The owner of code: a library, wherever it is installed, or the user."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_piper.common import user_lines


@pytest.mark.parametrize("package, installed", [("torchmetrics", True), ("my_models", False)])
def test_where_a_package_lies_does_not_say_whose_it_is(package, installed, tmp_path, monkeypatch):
    module = ModuleType(package)
    module.__file__ = str(tmp_path / package / "__init__.py")
    monkeypatch.setitem(sys.modules, package, module)
    user_lines.is_installed.cache_clear()
    assert user_lines.is_installed(str(tmp_path / package / "deep" / "file.py")) == installed
    assert not user_lines.is_installed(str(tmp_path / "train.py")) and not user_lines.is_installed(
        "/elsewhere/torchmetrics/file.py"
    )
    assert user_lines.is_installed(str(Path(pytest.__file__)))
    user_lines.is_installed.cache_clear()
