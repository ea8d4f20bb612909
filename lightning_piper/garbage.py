"""When Python looks for garbage that refers to itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without collections of garbage. Little of what a capture and a compilation make is garbage before they are over, and to look
    through all of it again and again takes up to a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
