"""Treat objects of a batch that hold tensors (graphs, encodings of a tokenizer) like containers of their
attributes, and rebuild them.

No method of their classes is called. A copy gets the original's attributes, with other tensors in place of
the original's tensors.
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

# Classes whose objects are never treated as containers.
_CLOSED = (
    type,
    types.ModuleType,
    nn.Module,
    torch.Generator,
    weakref.ref,
    np.ndarray,
    np.generic,
    BaseException,
)


@dataclass(frozen=True, eq=False)
class ContainerObject:
    """The entry of a batch spec for an object that holds tensors.

    Attributes:
        index: its index among the objects of the batch that hold tensors.
        kind: its class.
        attributes: name -> the batch spec's entry for the attribute's value.
    """

    index: int
    kind: type
    attributes: dict[str, Any] = field(default_factory=dict)

    def empty(self) -> Any:
        """Return an object of the class that does not have attributes yet."""
        return object.__new__(self.kind)

    @staticmethod
    def fill(empty: Any, attributes: dict[str, Any]) -> Any:
        for name, value in attributes.items():
            object.__setattr__(empty, name, value)
        return empty


@dataclass(frozen=True)
class RepeatedObject:
    """The entry of a batch spec for a repeated occurrence of an object that holds tensors.

    Attributes:
        index: the index of the object's `ContainerObject`.
        weak: whether the batch has a weak reference to the object here, not the object itself.
    """

    index: int
    weak: bool


def attributes_of(item: Any) -> dict[str, Any] | None:
    """Return name -> value for all attributes of an object, including slots. Return None if the object has no
    attributes, or cannot be rebuilt from them."""
    kind = type(item)
    if kind.__module__ == "builtins" or issubclass(kind, _CLOSED) or inspect.isroutine(item):
        return None
    found: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        found |= object.__getattribute__(item, "__dict__")
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = (
                f"_{base.__name__.lstrip('_')}{name}"
                if name.startswith("__") and not name.endswith("__")
                else name
            )
            if mangled not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):
                    found[mangled] = object.__getattribute__(item, mangled)
    if not found:
        return None
    if hasattr(kind, "__del__"):  # the end of a new object would run the user's code
        return found
    try:
        object.__new__(kind)
    except TypeError:  # the type is written in C
        return None
    return found


def entries_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes of an object, each with the last part of its path. Yield nothing if
    `attributes_of` returns None."""
    yield from ((f".{name}", value) for name, value in (attributes_of(item) or {}).items())
