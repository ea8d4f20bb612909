"""Control of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn off garbage collection inside the context.

    An import, a capture, a compilation or a search makes little garbage before its end. Repeated collections would take up to
    a quarter of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
