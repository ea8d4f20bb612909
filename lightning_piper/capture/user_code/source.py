"""Mark operations with the line of the user's code from which they come."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.fx.traceback as fx_traceback

from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import LIBRARIES, is_installed

LINE_KEY = "piper_line"  # metadata key of an operation: the line of the user's code that called the operation
# Metadata key of a backward operation: the line of the function that called the operation; see
# `line_in_backward`.
CALLED_KEY = "piper_called"


def line_in_backward() -> str:
    """Return `file:line` of the function that the backward pass is running: a hook, or the `backward` of an
    autograd function. Call it only while a backward pass runs.

    If the user's code runs, this is the innermost line of it. Code of `python -c` or an interpreter has no file,
    but is the user's if it is in `__main__`. If only code of installed libraries runs, this is the innermost line
    of it. Return "" if the backward pass runs neither, but a formula of torch or a function of Piper.
    """
    frame, found = sys._getframe(1), ""
    while frame is not None and frame.f_code.co_name != _torch.RUNS_BACKWARD:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and (
            name[0] != "<" or frame.f_globals.get("__name__") == "__main__"
        ):
            found = found or f"{name}:{frame.f_lineno}"
            if not is_installed(name):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


def mark_called(node: torch.fx.Node) -> None:
    """Mark a backward operation with the line of the function that the backward pass is running
    (`line_in_backward`). Do nothing for a forward operation, or if that line is ""."""
    if _torch.is_backward(node) and (line := line_in_backward()):
        node.meta[CALLED_KEY] = line


def marking_line(line: str) -> contextlib.AbstractContextManager[None]:
    """Within the returned context, traced operations are marked with this line. An empty line marks
    nothing."""
    return fx_traceback.annotate({LINE_KEY: line}) if line else contextlib.nullcontext()
