"""Control of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn off garbage collection inside the context.

    A capture and a compilation make little garbage before they are done, and repeated collections would take
    up to a quarter of the time of a capture or compilation.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
