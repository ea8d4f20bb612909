"""Refuse a step that changes files or starts programs: the captured step would not do so again."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_piper.capture.torch_private._torch import CHECKS_FILE
from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.common.user_lines import is_installed, user_line
from lightning_piper.errors import CaptureError

_OTHERS = (str(Path(__file__).parents[2]) + "/", str(Path(torch.__file__).parent) + "/")
_PYTHON = str(Path(contextlib.__file__).parent) + "/"
# The modules of `numpy.save`, `savez` and `savetxt`, in numpy 2 and 1.
_SAVING = ("numpy.lib._npyio_impl", "numpy.lib.npyio")
_STREAMS = (1, 2)  # a step may print
_OPENS = "opens a file to write into it"
# Description of a change -> functions of `os` that make it. Other functions of Python's library call these, such as `Path.touch`.
_CHANGES = {
    "writes into a file": ("write", "writev", "pwrite", "pwritev", "ftruncate", "truncate"),
    "renames a file": ("rename", "replace", "link", "symlink"),
    "removes a file": ("remove", "unlink", "rmdir"),
    "makes a folder": ("mkdir",),
    "starts a program": ("system",),
}
_SILENT = ("logging", "multiprocessing", "concurrent")  # packages that may do all this


@contextlib.contextmanager
def refusing_opened_files(step: str) -> Iterator[None]:
    """Within this context, the user's code cannot open a file to write into it, change files by functions of `os`,
    or start a program. Calls by functions of Python's library, `torch.save`, `numpy.save`, `savez` and `savetxt`
    count as the user's. `logging` may do all this, and so may other threads.

    An installed package may do it as well, except that it cannot open a file in a folder that is visible (a cache
    is in a hidden one).

    Args:
        step: the name of the step that is traced.
    """
    thread = threading.get_ident()

    def refusing(own: Callable[..., Any], action: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not _is_harmless(own, args, kwargs):
                opened = args[0] if args and action == _OPENS else None
                if _is_users(sys._getframe(1), opened):
                    raise _refusal(step, action)
            return own(*args, **kwargs)

        return call

    # pathlib calls `io.open`
    found = [(builtins, "open", _OPENS), (io, "open", _OPENS), (os, "open", _OPENS)]
    found += [(os, name, action) for action, names in _CHANGES.items() for name in names if hasattr(os, name)]
    with contextlib.ExitStack() as stack:
        for owner, name, action in (*found, (subprocess.Popen, "__init__", "starts a program")):
            stack.enter_context(replaced_attribute(owner, name, refusing(getattr(owner, name), action)))
        saves = _refusing_saves(step, thread)
        stack.enter_context(replaced_attribute(torch.serialization, CHECKS_FILE, saves))
        yield


def _is_harmless(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call only reads a file, prints, or makes a folder that exists."""
    first, second = (*args, None, None)[:2]
    if first == os.devnull:
        return True
    match function.__name__:
        case "open":  # `os.open` has flags, and perhaps a mode of permissions
            how = kwargs.get("flags", second)
            how = kwargs.get("mode", "r") if how is None else how
            return not (how & (os.O_WRONLY | os.O_RDWR) if isinstance(how, int) else set(how) & set("wax+"))
        case "write" | "writev":
            return first in _STREAMS
        case "mkdir":
            return os.path.isdir(kwargs.get("path", first))
    return False


def _refusing_saves(step: str, thread: int) -> Callable[[Any], None]:
    """Return what `torch.save` calls with its file, which C++ code opens then."""
    own = getattr(torch.serialization, CHECKS_FILE)

    @functools.wraps(own)
    def call(file: Any) -> None:
        own(file)
        if threading.get_ident() != thread or not isinstance(file, str | os.PathLike):
            return
        if os.fspath(file) != os.devnull and _is_users(sys._getframe(1).f_back, file):
            raise _refusal(step, _OPENS)

    return call


def _refusal(step: str, action: str) -> CaptureError:
    return CaptureError(
        f"{user_line()}: {step} {action}. A captured step would do this only while Piper captures it. "
        "Do it in a hook, such as on_train_batch_end or on_validation_batch_end [PIPER-C003]"
    )


def _is_users(frame: types.FrameType | None, opened: Any) -> bool:
    """Return whether the user's code runs this frame, directly or through Python's standard library or numpy's
    functions that save.

    Args:
        opened: the file that is opened. An installed package opens it for the user, unless it is in a cache.
    """
    while frame is not None:
        file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if name not in _SAVING:
            if file.startswith(_OTHERS) or name.partition(".")[0] in _SILENT:
                return False
            if is_installed(file):
                return isinstance(opened, str | os.PathLike) and not _is_cache(os.fspath(opened))
            if not file.startswith((_PYTHON, "<frozen")):
                return True
        frame = frame.f_back
    return False


def _is_cache(file: str | bytes) -> bool:
    """Return whether a file is in a hidden folder, in the folder of caches, or beside installed packages."""
    path = os.path.abspath(os.fsdecode(file))
    caches = os.environ.get("XDG_CACHE_HOME")
    hidden = any(part.startswith(".") or part == "__pycache__" for part in Path(path).parts)
    return hidden or is_installed(path) or (bool(caches) and path.startswith(str(caches)))
