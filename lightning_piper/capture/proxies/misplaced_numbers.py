"""Errors of code that accepts only Python's own numbers, and gets a number of the step's trace instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import FrameType

from lightning_piper.capture.proxies.deferred_numbers import DeferredNumber, is_deferred, refusal
from lightning_piper.capture.proxies.numbers import NumberProxy
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError


def misplaced(error: BaseException) -> CaptureError | None:
    """Return the error to raise if code that accepts only Python's own numbers has got a `DeferredNumber` or a
    `NumberProxy`: a function written in C, or `json`. None for any other error."""
    frames = list(_frames(error))
    if not isinstance(error, TypeError) or not frames:
        return None
    given = None
    if (last := frames[-1]).f_code is json.JSONEncoder.default.__code__:
        given = last.f_locals.get("o")
    elif NumberProxy.__name__ in str(error):
        given = next(
            (x for each in reversed(frames) for x in each.f_locals.values() if type(x) is NumberProxy), None
        )
    if is_deferred(given) or DeferredNumber.__name__ in str(error):
        return refusal(error)
    if type(given) is not NumberProxy:
        return None
    return CaptureError(
        f"{user_line(error)}: this line gives a number that depends on {given.where} to code that accepts only "
        "Python's own numbers, but in a captured step this number may change from step to step. Move the line to a "
        "hook, such as on_train_batch_start [PIPER-C001]"
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an error's traceback, from the outermost to the innermost."""
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next
