"""Limits of the size of a program. Piper rejects larger programs before it spends time and memory on them.

docs/limits.md lists these limits.
"""

from __future__ import annotations

import numbers
from fractions import Fraction

FILE = 16 * 2**20  # bytes of a program, a schedule, or a table of durations
DIRECTIVES = 10_000  # directives of a program
PASSES = 200_000  # forward and backward passes of a step: 2 x regions x microbatches
# Operations of a captured forward pass that may also run uncaptured. GPT-2 of 48 layers has 9,000.
OPERATIONS = 15_000
DEVICES = 2**16  # logical devices; their numbers are below this limit
INDEX = 2**31  # values of a tag are below this limit
NAME = 100  # characters of a tag or a stream
NUMBER = 10**15  # durations, bandwidths and similar numbers are 0, or between 1 / NUMBER and NUMBER
WIDTH = 10_000  # characters of a line of a chart
SHOWN = 300  # characters of a value in a message


def shown(value: object) -> str:
    """Return a value for a message: its `repr`, shortened if it is long.

    If `repr` fails, the text names only the type of the value.
    """
    try:
        text = repr(value)
    except Exception:
        # an integer with too many digits, lists nested without end, or an error in a user's __repr__
        return f"{kind_of(value)} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def kind_of(value: object) -> str:
    """Return the type of a value for a message, with its article: "an int", "a list". A placeholder in a captured
    step has the type of the value for which it stands."""
    name = value.__class__.__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_name(value: object) -> bool:
    """Return whether the value can be the name of a tag or a stream: a string of 1 to `NAME` printable
    characters."""
    return isinstance(value, str) and 0 < len(value) <= NAME and value.isprintable()


def integer(value: object) -> int | None:
    """Return an integer of Python or numpy as a Python int. None for any other value, including True and
    False."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def is_number(value: object, positive: bool = False) -> bool:
    """Return whether the value is an int, a float or a Fraction, and is 0 or from 1 / `NUMBER` to `NUMBER`.
    With `positive`, 0 is not valid. A bool, NaN or infinity is never valid."""
    if not isinstance(value, int | float | Fraction) or isinstance(value, bool):
        return False
    return (value == 0 and not positive) or 1 / NUMBER <= value <= NUMBER
