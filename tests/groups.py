"""Some jobs of a kind are in `make test`, all others, marked as `long`, in `make test-long`: a launch for
each of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
K = TypeVar("K")


def marked(every: Iterable[T], quick: Iterable[T]) -> list[Any]:
    """Parameters of a test: those that are not `quick` are marked as long."""
    quick = list(quick)
    return [
        x if x in quick else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.long)
        for x in every
    ]


def grouped(every: Iterable[K], quick: Iterable[K], size: int) -> list[list[K]]:
    """Groups for `on_demand`: the quick ones, then the others, so many at once: a launch must be done before
    a test's timeout.
    """
    quick = list(quick)
    rest = [key for key in every if key not in quick]
    return [quick, *(rest[i : i + size] for i in range(0, len(rest), size))]


def on_demand(groups: Iterable[Iterable[K]], run: Callable[[list[K]], Mapping[K, T]]) -> Callable[[K], T]:
    """What `run` makes of a key, together with all keys of its group, when the first of them is asked for."""
    lists, found = [list(group) for group in groups], dict[K, T]()

    def get(key: K) -> T:
        if key not in found:
            found.update(run(next(group for group in lists if key in group)))
        return found[key]

    return get
