"""How large a program may be: what is larger is refused before time and memory are spent on it. docs/limits.md lists these."""

from __future__ import annotations

import numbers
from fractions import Fraction

FILE = 16 * 2**20  # bytes of a program, a schedule, or a table of durations
DIRECTIVES = 10_000  # of a program
PASSES = 200_000  # forward and backward passes of a step: regions times microbatches, twice
DEVICES = 2**16  # logical devices; indices are below
INDEX = 2**31  # values of a tag are below
NAME = 100  # characters of a tag or a stream
NUMBER = 10**15  # durations, bandwidths and the like lie between its inverse and it, or are 0
WIDTH = 10_000  # characters of a line of a chart
SHOWN = 300  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message: its `repr`, if that is short and can be made."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, lists of lists without end, an error of somebody's __repr__
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def is_name(value: object) -> bool:
    """Can it be the name of a tag or a stream?"""
    return isinstance(value, str) and 0 < len(value) <= NAME and value.isprintable()


def integer(value: object) -> int | None:
    """An integer of Python or numpy as Python's; None for anything else, also for True and False."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def is_number(value: object, positive: bool = False) -> bool:
    """Is it a number within `NUMBER` that is no less than 0 (or more than 0)?"""
    if not isinstance(value, int | float | Fraction) or isinstance(value, bool):
        return False
    return (value == 0 and not positive) or 1 / NUMBER <= value <= NUMBER
