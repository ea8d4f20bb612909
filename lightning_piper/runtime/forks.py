"""What becomes of connections and memory in a process that is forked from this one, such as a worker of a DataLoader.

It begins with all that this process has. As long as it keeps a connection open, nobody sees that this process is gone; and what it
writes to memory that is shared would be written here, too.
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
    """Do this with it in each process that is forked from this one, before anything else runs there. Returns it."""
    _at_fork[x] = do
    return x


def _forked() -> None:
    for x, do in [*_at_fork.items()]:
        with contextlib.suppress(OSError):
            do(x)
    _at_fork.clear()


if hasattr(os, "register_at_fork"):  # else the system has no forks
    os.register_at_fork(after_in_child=_forked)
