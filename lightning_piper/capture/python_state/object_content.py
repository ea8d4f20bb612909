"""The content of objects that hold values without being lists or dicts: buffers of bytes, queues, context
variables, the values of a thread, and functions that cache their results."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import mmap
import os
import queue
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

MEMOISED = type(functools.cache(len))  # functions that cache their results
ENVIRONMENT: Any = type(os.environ)
# Attributes of these objects of the standard library are their content.
_ATTRIBUTES = (queue.Queue, collections.UserList, collections.UserString, threading.local)
_UNSET = object()
_LARGE = 2**24  # bytes; larger buffers are not saved
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def held_by(value: Any) -> dict[str, Any]:
    """Return the objects that such an object holds, by the rest of the expression a user would write for
    them."""
    if isinstance(value, contextvars.ContextVar):
        try:
            return {".get()": value.get()}
        except LookupError:
            return {".get()": _UNSET}
    if isinstance(value, _ATTRIBUTES):
        return {f".{name}": x for name, x in vars(value).items()}
    if isinstance(value, MEMOISED):
        return {f"(): result {i}": x for i, x in enumerate(cached_results(value))}
    return {}


def content_of(value: Any) -> Any:
    """Return the content of an object, as a value that has the same form as long as the content is the same.

    The value is None for an object of another kind.

    The results of a cached function do not count, because a step may add some.
    """
    if isinstance(value, (*_PLAIN, MEMOISED)):
        return None
    if found := held_by(value):
        return found
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if isinstance(value, mmap.mmap):  # it may be larger than memory
        return None
    return (view.format, view.shape, zlib.crc32(view if view.c_contiguous else view.tobytes()))


def restoring(value: Any) -> Callable[[], None] | None:
    """Return a function that restores the present content of a buffer or of a context variable; None for any
    other object."""
    if isinstance(value, contextvars.ContextVar):
        try:
            before = value.get()  # the default, if nothing has set it
        except LookupError:
            return None

        def set_again() -> None:
            if value.get() is not before:
                value.set(before)

        return set_again
    if isinstance(value, (bytes, mmap.mmap, *_PLAIN)):
        return None
    try:
        with memoryview(value) as view:
            if view.readonly or not view.c_contiguous or view.nbytes > _LARGE:
                return None
            content = view.tobytes()
    except (TypeError, ValueError, BufferError):
        return None

    def write_again() -> None:
        with memoryview(value) as view:
            if view.tobytes() == content:
                return
            if view.nbytes == len(content):
                view.cast("B")[:] = content
                return
        value[:] = content if isinstance(value, bytearray) else type(value)(value.typecode, content)

    return write_again


def cached_results(function: Any) -> Iterator[Any]:
    """The results that a function under `functools.cache` or `functools.lru_cache` keeps."""
    if not function.cache_info().currsize:
        return
    own = vars(function)
    found = [x for x in gc.get_referents(function) if x is not own]
    if function.cache_parameters()["maxsize"] is None:
        found = [x for entries in found if type(entries) is dict for x in entries.values()]
    else:  # it refers to its results, and to a dict of links between them
        found = [
            x
            for x in found
            if not (type(x) is dict and any(type(y).__name__ == "_lru_list_elem" for y in x.values()))
        ]
    yield from (x for x in found if not isinstance(x, _PLAIN))
