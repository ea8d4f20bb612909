"""Which line of the user's a problem belongs to."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import traceback
from importlib.metadata import Distribution, PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path

import torch
import torch.fx.traceback as fx_traceback

from lightning_piper.capture import _torch

LINE_KEY = "piper_line"  # in the metadata of an operation: the user's line
CALLED_KEY = "piper_called"  # of one of a backward pass: the line of the function that called it; see `line_in_backward`
LIBRARIES = tuple(str(Path(m.__file__).parent) + "/" for m in (torch, contextlib) if m.__file__) + (
    str(Path(__file__).parent.parent) + "/",
)


@functools.cache
def is_installed(file: str) -> bool:
    """Is it a file of an installed library, wherever that lies, and not one of the user's? A library may be found by PYTHONPATH, in
    a zip archive, or in the folder of a build system: the metadata of distributions say which packages there are."""
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return any(file.startswith(_folder_of(part)) and part in _packages() for part in file.split("/"))


@functools.cache
def _packages() -> frozenset[str]:
    """Top-level packages of distributions. One that is installed from where it is written is the user's, unless Lightning needs
    it."""
    needed: set[str] = set()
    for name in ("lightning", "pytorch-lightning"):
        with contextlib.suppress(PackageNotFoundError):
            needed |= {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in requires(name) or []}
    libraries = {each.name.lower() for each in distributions() if each.name.lower() in needed or not _is_editable(each)}
    found = {package for package, names in packages_distributions().items() if libraries & {name.lower() for name in names}}
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return frozenset(found - {"" if spec is None else spec.name.partition(".")[0]})


def _is_editable(distribution: Distribution) -> bool:
    return '"editable": true' in (distribution.read_text("direct_url.json") or "")


def _folder_of(package: str) -> str:
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) + "/" if file else "\0"


def user_line(error: BaseException | None = None) -> str:
    """`file:line (code)` of the innermost frame that is the user's; of an installed package's where there is no other."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    found = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))]
    found = [f for f in found if "/site-packages/lightning" not in f.filename or "/demos/" in f.filename]
    own = [frame for frame in found if not is_installed(frame.filename)] or found
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else "in training_step"


def shown_line(file: str, number: int) -> str:
    """As in `user_line`."""
    return f"{file}:{number} ({linecache.getline(file, number).strip()})"


def user_frame() -> str:
    """`file:line` of the innermost frame that is the user's own, quickly; nothing where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and not is_installed(name) and name[0] != "<":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def line_in_backward() -> str:
    """`file:line` of the function that a backward pass runs just now: a hook, or the `backward` of an autograd function. The user's
    own line, or a library's where there is none. Nothing where torch runs its own formula, or the package its own function."""
    frame, found = sys._getframe(1), ""
    while frame is not None and frame.f_code.co_name != _torch.RUNS_BACKWARD:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and name[0] != "<":
            found = found or f"{name}:{frame.f_lineno}"
            if not is_installed(name):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


def mark_called(node: torch.fx.Node) -> None:
    """Write the line of the function that a backward pass runs just now on an operation of that pass."""
    if _torch.is_backward(node) and (line := line_in_backward()):
        node.meta[CALLED_KEY] = line


def on_line(line: str) -> contextlib.AbstractContextManager[None]:
    """Operations that are traced inside are of this line."""
    return fx_traceback.annotate({LINE_KEY: line}) if line else contextlib.nullcontext()
