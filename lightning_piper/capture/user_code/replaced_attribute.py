"""Temporarily replace an attribute, such as a function of a library that a step calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context, the attribute `name` of a module or class is `value`. At the end, the original
    attribute returns.

    If the owner itself did not have the attribute before, but inherited it, the attribute is deleted from the
    owner at the end.
    """
    own = name in vars(owner)
    before = vars(owner).get(name)  # `getattr` of a class may return a bound method
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
