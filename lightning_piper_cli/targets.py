"""Import objects named on the command line: `package.module:name`, `path/to/file.py:name`.

This file does not import torch. The user's files do.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

TARGET = "package.module:name or path/to/file.py:name"


class UsageError(Exception):
    """An error raised if the command line names an object that does not exist or cannot be used."""


def module_of(target: str) -> nn.Module:
    """Return the module that a target names or makes.

    Raises:
        UsageError: The object is not a module.
    """
    from torch import nn

    module = made(target)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{target} gives an object of type {type(module).__name__}, not a module. Name a LightningModule "
            "class or a function that makes one"
        )
    return module


def program_of(target: str) -> Any:
    """Return the source of a program: the path of a JSON file, or the value that a function returns.

    Raises:
        UsageError: The target is neither the path of a JSON file nor the name of an object.
    """
    check_program(target)
    return target if target.endswith(".json") else made(target)


def made(target: str) -> Any:
    """Return the result of calling the target without arguments.

    A target that cannot be called, or is a module, is returned itself.

    Raises:
        UsageError: The target does not exist, or needs arguments.
    """
    found = _found(target)
    from torch import nn

    if not callable(found) or isinstance(found, nn.Module):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"{target} cannot be called without arguments: {error}. Name a function without required "
            "arguments"
        ) from None
    except ValueError as error:  # a builtin function
        raise UsageError(
            f"{target}: Python does not know which arguments it needs ({error}). Name a function without arguments "
            "that calls it"
        ) from None
    return found()


def check_program(target: str) -> None:
    """Raise a UsageError if a target is neither a path that ends in ".json", nor an object that
    `check_target` accepts. The JSON file itself is not looked for."""
    if target.endswith(".json"):
        return
    if ":" not in target:
        raise UsageError(
            f"{target!r} is not a program. Give the path of a JSON file (*.json), or a function that returns "
            f"the program, {TARGET}"
        )
    check_target(target)


def check_target(target: str) -> None:
    """Raise an error if there is nothing to import under a target. Does not import the user's code.

    Raises:
        UsageError: The target does not have the form of `TARGET`, or its file or package does not exist.
    """
    place, _ = _divided(target)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"there is no file {place!r}. Give the path of a Python file")
        return
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{place!r} is not the name of a Python module. Give {TARGET}")
    package = place.partition(".")[0]
    if package not in sys.modules and not _is_found(package):
        raise _no_module(package)


def _divided(target: str) -> tuple[str, str]:
    """Return the file or module of a target, and the name in it: `("train.py", "batch")` for
    "train.py:batch". Raise UsageError if one of them is missing."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"{target!r} does not name anything to import. Give {TARGET}")
    return place, name


def _is_found(package: str) -> bool:
    """Return whether the current directory or Python's path has a package. The path does not change."""
    path = sys.path.copy()
    _importable(Path.cwd())
    try:
        return importlib.util.find_spec(package) is not None
    finally:
        sys.path[:] = path


def _no_module(name: str) -> UsageError:
    """Return the error for a module that does not exist. `name` may have dots. If it has, the module before the
    last dot exists."""
    package, _, inner = name.rpartition(".")
    if package:
        return UsageError(f"module {package!r} has no module {inner!r} in it. Correct the name {name!r}")
    return UsageError(
        f"there is no module {name!r} in the current directory or installed. Correct the name, or run the command "
        f"in the directory of {name!r}"
    )


def _found(target: str) -> Any:
    """Import the file or module of a target, and return the object with the target's name in it. Raise
    UsageError if there is none."""
    check_target(target)
    place, name = _divided(target)
    found = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    before = ""
    for part in name.split("."):
        if not hasattr(found, part):
            public = [
                f"{before}{other}"
                for other, value in getattr(found, "__dict__", {}).items()
                if not other.startswith("_") and not inspect.ismodule(value)
            ]
            more = f" and {len(public) - 8} more" if len(public) > 8 else ""
            fix = f"Give one of its names: {', '.join(public[:8])}{more}" if public else "Define it there"
            raise UsageError(f"{place} has no {before + part!r}. {fix}")
        found, before = getattr(found, part), f"{before}{part}."
    return found


def _from_package(name: str) -> Any:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise _no_module(error.name) from None


def _from_file(path: Path) -> Any:
    """Return the Python module of a file. Run the file only once, also if several targets name it."""
    # The path is also the name in `sys.modules`, so that the module and the batch may come from the same
    # file.
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # as for each name that ends in .py
        _importable(Path.cwd())
        _importable(path.resolve().parent)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
