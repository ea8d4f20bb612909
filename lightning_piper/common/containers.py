"""Copy a container of any class and give the copy other contents."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any


def container_like(like: Any, values: Sequence[Any]) -> Any:
    """Return a container of the class of `like`, such as a named tuple or an `OrderedDict`, with other values.

    The copy keeps the attributes of `like`, such as the default of a `defaultdict`, because users' code may
    read them. Only the copy of a mapping that cannot be changed does not keep them.

    Args:
        like: A mapping, a list or a tuple.
        values: The values of the copy, as many as `like` has, in the order of its keys or indices.

    Raises:
        Exception: The user's class does not allow other contents.
    """
    if type(like) is dict:
        return dict(zip(like, values, strict=True))
    if type(like) in (list, tuple):
        return type(like)(values)
    if isinstance(like, tuple):
        found = type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
        if hasattr(like, "__dict__"):
            vars(found).update(vars(like))
        return found
    if isinstance(like, Mapping) and not isinstance(like, MutableMapping):
        return type(like)(dict(zip(like, values, strict=True)))  # type: ignore[call-arg]
    made: Any = copy.copy(like)
    for key, value in zip(like if isinstance(like, Mapping) else range(len(like)), values, strict=True):
        made[key] = value
    return made
