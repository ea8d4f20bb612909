"""Record errors of the capture that a step's own code has caught (`try: ... except Exception: ...`).

A step that has caught one of them may do something that it would not do on a device.
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
    """Within this context, the step's code runs. Yield a function that returns the errors of the capture that
    the step itself has caught. Errors that tracing code has caught do not count."""
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
    """Return whether the step's code has caught the error. A traceback begins in the frame that caught the
    error."""
    return not caught.tb_frame.f_code.co_filename.startswith(LIBRARIES)
