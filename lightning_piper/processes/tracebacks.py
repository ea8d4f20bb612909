"""Prints an error that ends a process: the user's lines, the message and the causes. The error is one of this
package, or one that the user's code has raised in a step or hook.

The traceback of such an error has up to a hundred frames of Lightning, torch and this package, in every
process. The error itself keeps all of them: a debugger shows them, and code that catches the error reads
them.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary, TracebackException, extract_tb
from types import TracebackType
from typing import Any

from lightning_piper.accelerators._torch_groups import is_default_excepthook
from lightning_piper.capture.python_state.name_scan import is_users_file
from lightning_piper.errors import PiperError

VARIABLE = "PIPER_TRACEBACK"
LONGEST = 1000  # characters of an error in one line
ENDED = "_piper_ended_a_fit"  # attribute of an error that has ended a fit
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
HINT = f"(Frames of libraries are left out. {VARIABLE}=full shows them.)"


def print_short_tracebacks(rank: int, one_line: bool, ended: BaseException | None = None) -> None:
    """Make this process print a short traceback if an uncaught `PiperError`, or an error of the user's code in
    a fit, ends it.

    Do nothing if another package, such as a debugger, has installed a hook, or if the environment has
    PIPER_TRACEBACK=full.

    Args:
        rank: Rank of this process.
        one_line: Print a single line, because another process prints the traceback.
        ended: The error that has ended a fit.
    """
    if ended is not None:
        vars(ended)[ENDED] = True
    hook = sys.excepthook
    if os.environ.get(VARIABLE) != "full" and is_default_excepthook(hook):
        sys.excepthook = functools.partial(_print, hook, rank, one_line)


def _print(
    otherwise: Callable[..., Any],
    rank: int,
    one_line: bool,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    if isinstance(error, PiperError) or (ENDED in vars(error) and is_of_users_code(error, frames)):
        shown = line(error, rank, frames) if one_line else short_traceback(error, frames)
        print(shown, file=sys.stderr, flush=True)
    else:
        otherwise(kind, error, frames)


def is_of_users_code(error: BaseException, frames: TracebackType | None) -> bool:
    """Return whether the user's code, or a library that it called, has raised an error in a step or hook. False
    for an error inside of this package, because the package's frames then say where the fault is."""
    files = [frame.filename for frame in extract_tb(frames)]
    called = list(itertools.dropwhile(is_users_file, files))  # from the call of `trainer.fit`
    return (
        isinstance(error, Exception) and any(map(is_users_file, called)) and not files[-1].startswith(PACKAGE)
    )


def short_traceback(error: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback of an error and its causes as text, with the frames of the user's code only.

    An error, or a cause, that is not an error of this package keeps the frame that raised it.
    """
    return "".join(_shortened(error, frames).format()) + HINT


def line(error: BaseException, rank: int, frames: TracebackType | None) -> str:
    """Return an error in one line, with the innermost line of the user's code, if there is one. An example is
    "rank 1: train.py:12: CaptureError: ...". The message has at most `LONGEST` characters."""
    own = [frame for frame in _shortened(error, frames).stack if is_users_file(frame.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    message = " ".join(" ".join((str(error), *getattr(error, "__notes__", []))).split())
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} ..."
    return f"rank {rank}: {where}{type(error).__name__}: {message}"


def _shortened(error: BaseException, frames: TracebackType | None) -> TracebackException:
    shown = TracebackException(type(error), error, frames)
    _drop_frames(shown, error)
    return shown


def _drop_frames(shown: TracebackException, error: BaseException) -> None:
    """Drop the frames outside of the user's code, in this traceback and in the tracebacks of its causes."""
    raised_in = None if isinstance(error, PiperError) else shown.stack[-1:]
    shown.stack = StackSummary.from_list(
        [frame for frame in shown.stack if is_users_file(frame.filename) or [frame] == raised_in]
    )
    for link in ("__cause__", "__context__"):
        inner, its_error = getattr(shown, link), getattr(error, link)
        if inner is not None and its_error is not None:
            _drop_frames(inner, its_error)
