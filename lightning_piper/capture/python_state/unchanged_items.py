"""Quick comparisons of containers: while the same immutable objects are in a container, its content is the same."""

from __future__ import annotations

import operator
import types
from argparse import Namespace
from typing import Any

from lightning_piper.capture.torch_private import _torch

NAMESPACES = (types.SimpleNamespace, Namespace)
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
)  # immutable values without other objects
_DEPTH = 8  # the depth up to which containers in a container are compared in this way
_END = object()  # the end of a container in the list of `items_of`


def entries(value: Any) -> Any:
    """Return the dict of a namespace's attributes. Return any other value itself."""
    # `isinstance` would read an attribute of a weak proxy, whose object may have gone.
    return vars(value) if issubclass(type(value), NAMESPACES) else value


def items_of(value: Any) -> list[Any] | None:
    """Return the immutable objects in a list, dict, set, tuple or namespace, at any depth, between the class of each
    container and `_END`. While these are the same objects, the form of the value is the same.

    Return None for another value, if another kind of object is in it, or if it is nested deeper than `_DEPTH`."""
    found: list[Any] = []

    def add(value: Any, depth: int) -> bool:
        found.append(type(value))
        value = entries(value)
        if type(value) not in (dict, list, set, tuple) or depth > _DEPTH:
            return False
        inside = value
        if type(value) is dict:
            if not _ATOMS.issuperset(map(type, value)):
                return False
            found.extend(value)
            inside = value.values()
        if _ATOMS.issuperset(map(type, inside)):
            found.extend(inside)
        else:
            for x in inside:
                if type(x) in _ATOMS:
                    found.append(x)
                elif not add(x, depth + 1):
                    return False
        found.append(_END)
        return True

    return found if add(value, 0) else None


def version_of(value: Any) -> int | None:
    """Return Python's version counter of a dict. No two states of dicts have the same version. Return None for another
    value, or if the counter does not follow each change."""
    if type(value) is not dict or not _torch.dict_version_follows_attributes():
        return None
    return _torch.dict_version(value)


def are_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def is_flat(value: dict[Any, Any]) -> bool:
    """Return whether all keys and values of a dict are immutable, so that its version follows each change."""
    return _ATOMS.issuperset(map(type, value)) and _ATOMS.issuperset(map(type, value.values()))
