"""Cleanup in processes that are forked from this process, such as the workers of a DataLoader.

A forked process inherits all connections and memory mappings. While it keeps a connection open, the other end
cannot see that this process has ended. A write to shared memory would also change this process's memory.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_at_fork = weakref.WeakKeyDictionary[Any, Callable[[Any], object]]()


def in_forks(x: T, do: Callable[[T], object]) -> T:
    """Call `do(x)` in each process forked from this one, before anything else runs there. Returns `x`."""
    _at_fork[x] = do
    return x


def _forked() -> None:
    for x, do in [*_at_fork.items()]:
        with contextlib.suppress(OSError):
            do(x)
    _at_fork.clear()


if hasattr(os, "register_at_fork"):  # not on systems without fork
    os.register_at_fork(after_in_child=_forked)
