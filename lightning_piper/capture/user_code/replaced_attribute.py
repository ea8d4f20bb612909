"""Temporarily replace an attribute, such as a function of a library that a step calls."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
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


@contextlib.contextmanager
def replaced_entries(owner: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, a dict, such as the attributes of an object, also has these entries. At the end, the
    original entries return."""
    before = {name: owner[name] for name in entries if name in owner}
    owner.update(entries)
    try:
        yield
    finally:
        for name in entries:
            owner.pop(name, None)
        owner.update(before)


def checked_calls(
    owner: Any, name: str, check: Callable[..., None]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `check` gets the arguments of each call of a function in this thread, before the
    function runs. If `check` raises an error, the function does not run.

    Args:
        owner, name: the module or class, and the name of its function.
    """
    own, thread = getattr(owner, name), threading.get_ident()

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            check(*args, **kwargs)
        return own(*args, **kwargs)

    return replaced_attribute(owner, name, call)
