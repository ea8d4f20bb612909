"""Record errors of the capture that a step's own code has caught (`try: ... except Exception: ...`).

After the step has caught such an error, it may run code that does not run on a device, where the error does not
occur. So a trace of this code is not valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import LIBRARIES
from lightning_piper.errors import CaptureError

REFUSALS = (CaptureError, *_torch.WITHOUT_VALUES)  # classes of the capture's errors


@contextlib.contextmanager
def recording_refusals() -> Iterator[Callable[[], Iterator[Exception]]]:
    """Record errors of the capture (`REFUSALS`) while the step's code runs in this context.

    Yield a function that returns an iterator over the recorded errors that the step itself has caught, oldest
    first. The step is all code outside of torch, Python's standard library and Piper. Errors that torch or
    Piper has caught do not count.
    """
    found: list[Exception] = []
    before: list[tuple[type[Exception], Any]] = [(kind, kind.__dict__.get("__init__")) for kind in REFUSALS]

    # Record each error of these classes when it is made. Its traceback shows later which code caught it.
    def noting(kind: type[Exception]) -> Callable[..., None]:
        original: Any = kind.__init__

        def __init__(self: Exception, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            found.append(self)

        return __init__

    try:
        for kind, _ in before:
            setattr(kind, "__init__", noting(kind))  # noqa: B010
        yield lambda: (
            error for error in found if error.__traceback__ is not None and _is_step(error.__traceback__)
        )
    finally:
        for kind, init in before:
            if init is None:
                delattr(kind, "__init__")
            else:
                setattr(kind, "__init__", init)  # noqa: B010


def _is_step(caught: TracebackType) -> bool:
    """Return whether the step's code has caught the error of this traceback. The first entry of a traceback
    is the frame that caught the error."""
    return not caught.tb_frame.f_code.co_filename.startswith(LIBRARIES)
