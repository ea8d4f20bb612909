"""Groups of jobs for launches: some jobs of a kind run in `make test`, and all other jobs, marked as `long`,
in `make test-long`. Each of the two has its own launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
K = TypeVar("K")


def marked(every: Iterable[T], quick: Iterable[T]) -> list[Any]:
    """Return the arguments for `pytest.mark.parametrize`, in the order of `every`. Those that are not in
    `quick` are marked as long."""
    quick = list(quick)
    return [
        x if x in quick else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.long)
        for x in every
    ]


def grouped(every: Iterable[K], quick: Iterable[K], size: int) -> list[list[K]]:
    """Return groups for `on_demand`: first the quick keys, then the other keys, at most `size` in a group, so
    that a launch ends before a test's timeout.
    """
    quick = list(quick)
    rest = [key for key in every if key not in quick]
    return [quick, *(rest[i : i + size] for i in range(0, len(rest), size))]


def on_demand(groups: Iterable[Iterable[K]], run: Callable[[list[K]], Mapping[K, T]]) -> Callable[[K], T]:
    """Return a function that returns the result for a key. The first call for a key of a group calls `run`,
    which returns the results for all keys of the group."""
    lists, found = [list(group) for group in groups], dict[K, T]()

    def get(key: K) -> T:
        if key not in found:
            found.update(run(next(group for group in lists if key in group)))
        return found[key]

    return get
