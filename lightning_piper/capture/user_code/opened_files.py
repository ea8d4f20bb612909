"""Refuse a step that opens a file to write into it: the captured step would not write again."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def refusing_opened_files(step: str) -> Iterator[None]:
    """Within this context, `open` raises an error if the user's code opens a file to write into it, itself or by
    `torch.save`, `numpy.save`, `savez` or `savetxt`. Packages, such as caches of torch, and `logging` may do so.

    Args:
        step: the name of the step that is traced.
    """
    with (
        replaced_attribute(builtins, "open", _refusing(builtins.open, step)),
        replaced_attribute(io, "open", _refusing(io.open, step)),  # pathlib calls this name
        replaced_attribute(torch.serialization, CHECKS_FILE, _refusing_saves(step)),
    ):
        yield


def _refusing(own: Callable[..., Any], step: str) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and file != os.devnull and _is_users(sys._getframe(1)):
            raise _refusal(step)
        return own(file, mode, *args, **kwargs)

    return call


def _refusing_saves(step: str) -> Callable[[Any], None]:
    """Return what `torch.save` calls with its file, which C++ code opens then."""
    own = getattr(torch.serialization, CHECKS_FILE)

    @functools.wraps(own)
    def call(file: Any) -> None:
        own(file)
        save = sys._getframe(1)
        if isinstance(file, str | os.PathLike) and os.fspath(file) != os.devnull and _is_users(save.f_back):
            raise _refusal(step)

    return call


def _refusal(step: str) -> CaptureError:
    return CaptureError(
        f"{user_line()}: {step} opens a file to write into it. A captured step would do this only while Piper "
        "captures it. Write the file in a hook, such as on_train_batch_end or on_validation_batch_end"
        " [PIPER-C003]"
    )


def _is_users(frame: types.FrameType | None) -> bool:
    """Return whether the user's code runs this frame, directly or through Python's standard library or numpy's
    functions that save."""
    while frame is not None:
        file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if name not in _SAVING:
            if file.startswith(_OTHERS) or name.partition(".")[0] == "logging" or is_installed(file):
                return False
            if not file.startswith((_PYTHON, "<frozen")):
                return True
        frame = frame.f_back
    return False
