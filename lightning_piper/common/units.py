"""Durations and counts: a stopwatch, and texts in fitting units."""

from __future__ import annotations

import time

_COUNTS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}
# Seconds from which a duration is shown in seconds. Fewer seconds have three digits in milliseconds.
_ROUNDS_UP = 0.9995


class Stopwatch:
    """A context manager that adds up the time spent inside of it.

    Attributes:
        seconds: The sum of the seconds between each `__enter__` and its `__exit__`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0

    def __enter__(self) -> Stopwatch:
        self._begin = time.monotonic_ns()  # tests replace the other clocks, which Lightning reads
        return self

    def __exit__(self, *raised: object) -> None:
        self.seconds += (time.monotonic_ns() - self._begin) / 1e9


def duration(seconds: float, digits: int = 3) -> str:
    """Return a duration in ms below a second, in s below two minutes, and in min above.

    Args:
        seconds: The duration.
        digits: Number of significant digits, at least 3. Minutes have one decimal place.
    """
    if seconds < _ROUNDS_UP:
        return f"{1e3 * seconds:.{digits}g} ms"
    return f"{seconds:.{digits}g} s" if seconds < 119.5 else f"{seconds / 60:.1f} min"


def compact(count: int) -> str:
    """Return a count in full below 10,000, and in three digits above, such as "1.24B" for 1,236,000,000."""
    if count < 10_000:
        return f"{count:,}"
    unit, size = next((unit, size) for unit, size in _COUNTS.items() if count >= _ROUNDS_UP * size)
    return f"{count / size:.3g}{unit}"


def counted(n: int, what: str) -> str:
    """Return a number with its noun: `1 program`, `2,612,532 programs` or `2 processes`."""
    plural = "" if n == 1 else "es" if what.endswith(("s", "x", "ch")) else "s"
    return f"{n:,} {what}{plural}"
