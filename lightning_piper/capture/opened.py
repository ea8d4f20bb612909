"""Objects of a batch that hold tensors (graphs, encodings of a tokenizer): opened like containers, and put together again.

Nothing of their classes is called. A copy gets the attributes of the original, with other tensors in place of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

_CLOSED = (type, types.ModuleType, nn.Module, torch.Generator, weakref.ref, np.ndarray, np.generic, BaseException)


@dataclass(frozen=True, eq=False)
class Opened:
    """Stands in a batch spec for an object that holds tensors.

    Attributes:
        index: of the opened objects of the batch.
        kind: its class.
        attributes: by name, with every tensor replaced by its place.
    """

    index: int
    kind: type
    attributes: dict[str, Any] = field(default_factory=dict)

    def empty(self) -> Any:
        """An object of the class, without attributes."""
        return object.__new__(self.kind)

    @staticmethod
    def fill(empty: Any, attributes: dict[str, Any]) -> Any:
        for name, value in attributes.items():
            object.__setattr__(empty, name, value)
        return empty


@dataclass(frozen=True)
class Again:
    """Stands for an opened object that stands elsewhere in the batch as well; or, `weak`, for a weak reference to it."""

    index: int
    weak: bool


def attributes_of(item: Any) -> dict[str, Any] | None:
    """All attributes that an object has of its own; None for what is not made of them alone."""
    kind = type(item)
    if kind.__module__ == "builtins" or issubclass(kind, _CLOSED) or inspect.isroutine(item):
        return None
    found: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        found |= object.__getattribute__(item, "__dict__")
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if mangled not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):
                    found[mangled] = object.__getattribute__(item, mangled)
    if not found:
        return None
    try:
        object.__new__(kind)
    except TypeError:  # it is made in C
        return None
    return found


def entries_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, each with the end of its path."""
    yield from ((f".{name}", value) for name, value in (attributes_of(item) or {}).items())
