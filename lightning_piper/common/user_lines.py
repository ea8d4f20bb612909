"""Finds the line of the user's code that runs, or that an error comes from."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
import traceback
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distributions,
    packages_distributions,
    requires,
)
from pathlib import Path
from typing import Any

import torch

# Beginnings of file names whose code is not the user's: torch, Python's standard library and this package.
LIBRARIES = tuple(str(Path(m.__file__).parent) + "/" for m in (torch, contextlib) if m.__file__) + (
    str(Path(__file__).parents[1]) + "/",
)


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether the file belongs to an installed library, not to the user.

    A library may be on PYTHONPATH, in a zip archive, or in a build system's folder. So the metadata of
    distributions decide, not the path.
    """
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return any(file.startswith(_folder_of(part)) and part in _packages() for part in file.split("/"))


@functools.cache
def _packages() -> frozenset[str]:
    """Return the top-level packages of installed libraries. An editable installation counts as the user's
    code, unless Lightning requires it. So does the package that runs as the program (`python -m package`).
    """
    needed: set[str] = set()
    for name in ("lightning", "pytorch-lightning"):
        with contextlib.suppress(PackageNotFoundError):
            needed |= {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in requires(name) or []}
    libraries = {
        each.name.lower() for each in distributions() if each.name.lower() in needed or not _is_editable(each)
    }
    found = {
        package
        for package, names in packages_distributions().items()
        if libraries & {name.lower() for name in names}
    }
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return frozenset(found - {"" if spec is None else spec.name.partition(".")[0]})


def _is_editable(distribution: Distribution) -> bool:
    return '"editable": true' in (distribution.read_text("direct_url.json") or "")


def _folder_of(package: str) -> str:
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) + "/" if file else "\0"


def member(path: str) -> str:
    """Return a module's member as the user's code names it: `self.layers[0].weight` for `layers.0.weight`."""
    return "self" + re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f".{path}")


def user_line(error: BaseException | None = None) -> str:
    """Return `file:line (code)` of the innermost frame in the user's code, of `error` or of the running code.
    If there is no such frame, use the innermost frame in an installed package other than torch, Lightning and
    this package. If there is none, return "in training_step"."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    found = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))]
    found = [f for f in found if "/site-packages/lightning" not in f.filename or "/demos/" in f.filename]
    own = [frame for frame in found if not is_installed(frame.filename)] or found
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else "in training_step"


def shown_line(file: str, number: int) -> str:
    """Return a line of a file as `file:line (code)`, the form of `user_line`."""
    return f"{file}:{number} ({linecache.getline(file, number).strip()})"


def defined_at(function: Any) -> str:
    """Return ` (file:line)` of the definition of a Python function or method, to append to a message; "" for another
    callable."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def user_frame() -> str:
    """Return `file:line` of the innermost frame in the user's code, found quickly; "" if there is no such
    frame."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and not is_installed(name) and name[0] != "<":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
