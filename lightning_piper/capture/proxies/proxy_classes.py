"""Return the class of the object that a proxy stands for, as `type` does for the object itself.

Python code cannot change the result of `type`. So while a step is traced, the user's code gets `NAMES["type"]`
of `deferred_numbers.py` under this name, which calls `class_of`.
"""

from __future__ import annotations

from typing import Any

STANDS_FOR = "_piper_stands_for"  # the attribute of a class that has replaced the class of a user's object


class Proxy:
    """The base class of proxies. The attribute `__class__` of a proxy is the class of the object that the proxy
    stands for."""

    __slots__ = ()


def class_of(value: Any) -> type:
    """Return the class of a value: for a proxy, the class of its object. For an object whose class Piper has
    replaced during a trace, the user's class."""
    kind = type(value)
    if issubclass(kind, Proxy):
        return value.__class__  # type: ignore[no-any-return]
    found: type = vars(kind).get(STANDS_FOR, kind)
    return found
