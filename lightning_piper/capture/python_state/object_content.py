"""Read the content of objects that hold values but are not lists or dicts, such as buffers of bytes, queues,
context variables, thread-local values, and functions that cache their results. Guards compare the content.
After a failed trace, Piper restores some of it (`restoring`)."""

from __future__ import annotations

import collections
import contextvars
import csv
import decimal
import functools
import gc
import io
import logging
import mmap
import os
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event as SharedEvent
from typing import Any

MEMOISED = type(functools.cache(len))  # type of functions that cache their results


def _types_of_links() -> tuple[type, ...]:
    """Return the type of the values in the internal dict of a function with a bounded cache, as a tuple.

    The values are links to the cached results. Their type does not have a public name, so this function
    makes a sample.
    """
    sample = functools.lru_cache(maxsize=1)(len)
    sample("")
    dicts = (x for x in gc.get_referents(sample) if type(x) is dict and x is not vars(sample))
    return tuple({type(link) for links in dicts for link in links.values()})


_LINKS = _types_of_links()
ENVIRONMENT: Any = type(os.environ)
# Classes of the standard library whose attributes are their content.
ATTRIBUTES = (
    collections.UserList, collections.UserString, threading.local, threading.Event, threading.Semaphore,
)  # fmt: skip
_VIEW: Any = type({}.values())
_TEXT_OR_BYTES = (io.StringIO, io.BytesIO)
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
CSV_WRITER: Any = type(csv.writer(io.StringIO()))
# Class, or classes, of the standard library -> function that reads the content of an object that does not have
# attributes for it. The flags of a decimal context do not count, because every computation may set them.
_READERS: dict[type | tuple[type, ...], Callable[[Any], Any]] = {
    _TEXT_OR_BYTES: lambda file: None if file.closed else (file.getvalue(), file.tell()),
    type(threading.Lock()): lambda lock: lock.locked(),
    decimal.Context: lambda context: (
        context.prec,
        context.rounding,
        context.Emin,
        context.Emax,
        context.clamp,
    ),
    logging.Logger: lambda logger: (logger.getEffectiveLevel(), logger.disabled),
    weakref.finalize: lambda finalizer: finalizer.alive,
    SynchronizedBase: lambda shared: zlib.crc32(shared.get_obj()),
    SharedEvent: lambda event: event.is_set(),
}
# Classes (module, name) through which a step reaches other threads, other processes or a database, or which keep their
# state in C. Piper cannot see what a step does with such an object, and cannot undo it.
_OUTSIDE = frozenset({
    ("sqlite3", "Connection"), ("sqlite3", "Cursor"), ("sqlite3", "Blob"), ("subprocess", "Popen"),
    ("socket", "socket"), ("queue", "Queue"), ("_queue", "SimpleQueue"), ("concurrent.futures._base", "Executor"),
    ("multiprocessing.pool", "Pool"), ("multiprocessing.queues", "Queue"), ("multiprocessing.queues", "SimpleQueue"),
    ("multiprocessing.connection", "_ConnectionBase"), ("multiprocessing.managers", "BaseProxy"),
    ("numpy.random.bit_generator", "BitGenerator"), ("numpy.random.bit_generator", "SeedSequence"),
    ("_sre", "SRE_Scanner"), ("_hashlib", "HASH"), ("torch.quasirandom", "SobolEngine"),
})  # fmt: skip
_UNSET = object()
_LARGE = 2**24  # in bytes; larger buffers are not saved
# `files_behind` visits at most this many objects, and enters objects of these classes of Python.
_MANY_BEHIND = 200
_ENTERED = (dict, list, tuple, collections.deque)
# Packages whose classes keep their state where guards do not see it. Classes of Python's library also do.
_LIBRARIES = frozenset({"torch", "numpy", "lightning", "pytorch_lightning"})
# Packages of Python's library whose objects have no file of their own, or write into it in other threads.
_WITHOUT_FILES = frozenset({
    "asyncio", "builtins", "collections", "concurrent", "contextvars", "enum", "logging",
    "multiprocessing", "pathlib", "queue", "random", "re", "threading", "types", "typing", "weakref",
})  # fmt: skip
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def held_by(value: Any) -> dict[str, Any]:
    """Return the objects that `value` holds: a context variable, an object of `ATTRIBUTES` such as a queue, the
    view of a dict's values, or a function that caches its results. A writer of the module `csv` holds its file.
    Return an empty dict for any other object.

    The keys are the end of the expression that a user would write for an object, such as ".get()". A context
    variable without a value holds a placeholder.
    """
    if isinstance(value, contextvars.ContextVar):
        try:
            return {".get()": value.get()}
        except LookupError:
            return {".get()": _UNSET}
    if isinstance(value, _VIEW):
        return {f": value {i}": x for i, x in enumerate(value)}
    if isinstance(value, ATTRIBUTES):
        return {f".{name}": x for name, x in vars(value).items()}
    if isinstance(value, MEMOISED):
        return {f"(): result {i}": x for i, x in enumerate(cached_results(value))}
    if isinstance(value, CSV_WRITER):  # it has no public name for its file, but refers to the file's `write`
        writes = (x for x in gc.get_referents(value) if getattr(x, "__name__", None) == "write")
        return next(({"'s file": write.__self__} for write in writes if hasattr(write, "__self__")), {})
    return {}


def content_of(value: Any) -> Any:
    """Return a value whose form (`form_of`) stays equal while the content of the object stays the same.

    Return None for an object whose content this module cannot read, and for functions, modules and classes.
    The results that a function caches do not count as its content, because a step may add results.
    """
    if isinstance(value, (*_PLAIN, MEMOISED)):
        return None
    if found := held_by(value):
        return found
    for kinds, read in _READERS.items():
        if isinstance(value, kinds):
            return ("content", read(value))
    if is_disk_file(value):
        return ("position", getattr(value, "name", None), position_of(value))
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if isinstance(value, mmap.mmap):  # the mapped file may be larger than memory
        return None
    return (view.format, view.shape, zlib.crc32(view if view.c_contiguous else view.tobytes()))


def is_disk_file(value: Any) -> bool:
    """Return whether the value is an open file whose position tells what was read from it or written into it. The
    standard streams are not: a step may print."""
    return (
        isinstance(value, _FILES)
        and value not in _streams()
        and not value.closed
        and _can_be_shortened(value)
    )


def position_of(file: Any) -> int | None:
    """Return the position in a file; None for a text file of which a loop has read some lines."""
    try:
        found: int = file.tell()
    except OSError:
        return None
    return found


def reaches_outside(value: Any) -> bool:
    """Return whether a step that uses the object may change something that Piper can neither see nor undo.

    The object is of a class of `_OUTSIDE`, or a mapped file. Or it is an open file that cannot be shortened, such as a
    pipe or a compressed file. Or it is an iterator of `is_opaque_iterator`.
    """
    if isinstance(value, mmap.mmap):
        try:
            return not memoryview(value).readonly
        except ValueError:  # the mapped file is closed
            return False
    if isinstance(value, io.IOBase):
        return (
            _is_open_to_write(value)
            and not isinstance(value, _TEXT_OR_BYTES)
            and not _can_be_shortened(value)
        )
    return is_opaque_iterator(value) or _is_outside(value)


def _is_outside(value: Any) -> bool:
    return any((each.__module__, each.__qualname__) in _OUTSIDE for each in type(value).__mro__)


def is_opaque_iterator(value: Any) -> bool:
    """Return whether the value is an iterator of a class that the user did not write, such as a generator, a DataLoader's
    iterator or a reader of the module `csv`. Guards do not see its position."""
    take = getattr(type(value), "__next__", None)
    if take is None or isinstance(value, (io.IOBase, *weakref.ProxyTypes)) or _is_outside(value):
        return False
    package = type(value).__module__.partition(".")[0]
    return not (
        isinstance(take, types.FunctionType)
        and package not in _LIBRARIES
        and package not in sys.stdlib_module_names
    )


def _is_open_to_write(file: Any) -> bool:
    return file not in _streams() and not file.closed and file.writable()


def _can_be_shortened(file: Any) -> bool:
    """Return whether a file's end shows what was written into it, and can be moved back. The bytes of a text file may
    go into a compressed file, where this is not possible."""
    if not file.seekable():
        return False
    while isinstance(file, io.TextIOWrapper | io.BufferedReader | io.BufferedWriter | io.BufferedRandom):
        file = file.buffer if isinstance(file, io.TextIOWrapper) else file.raw
    return isinstance(file, io.FileIO | io.BytesIO)


def _streams() -> tuple[Any, ...]:
    return sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def files_behind(value: Any) -> list[Any]:
    """Return the files that an object of Python's library may read or write: the file of a `csv.DictWriter`, of
    a `codecs.StreamWriter`, of a temporary file, or of the method `write` of a file. Also return objects of
    `reaches_outside`. The objects may be in a list, tuple or dict.

    The list is empty for the files themselves and for objects of other classes. It is empty for loggers and
    standard streams, because a step may log and print.
    """
    if isinstance(value, (*_FILES, *_TEXT_OR_BYTES)):
        return []
    if type(value) not in _ENTERED and not _may_hold_file(value):
        return []
    found, seen, waiting = list[Any](), {id(value), *map(id, _streams())}, [value]
    while waiting and len(seen) < _MANY_BEHIND:
        for x in gc.get_referents(waiting.pop())[:_MANY_BEHIND]:
            if id(x) in seen:
                continue
            seen.add(id(x))
            if is_disk_file(x) or reaches_outside(x) or (isinstance(x, _TEXT_OR_BYTES) and not x.closed):
                found.append(x)
            elif type(x) in _ENTERED or _may_hold_file(x):
                waiting.append(x)
    return found


def _may_hold_file(value: Any) -> bool:
    """Return whether the value is a method, or an object of a class of Python's library that may write into a
    file when its methods are called."""
    if isinstance(value, types.BuiltinMethodType | types.MethodType | types.MethodWrapperType):
        return not isinstance(value.__self__, types.ModuleType | type | None)
    package = type(value).__module__.partition(".")[0]
    return package in sys.stdlib_module_names and package not in _WITHOUT_FILES


def restoring(value: Any) -> Callable[[], None] | None:
    """Return a function that restores the current content of an object. Return None if this is not possible.

    It is possible for these objects:

    - a context variable with a value
    - a file in memory that is not closed (`StringIO`, `BytesIO`)
    - an open file on a disk, if later code only reads or appends
    - a buffer, such as a `bytearray`, that is writable, contiguous and at most `_LARGE` bytes large, even if
      processes share it (`multiprocessing.Value`, `multiprocessing.Array`)
    - an event that processes share (`multiprocessing.Event`)
    """
    if isinstance(value, SynchronizedBase):
        return restoring(value.get_obj())
    if isinstance(value, SharedEvent):
        return value.set if value.is_set() else value.clear
    if isinstance(value, contextvars.ContextVar):
        try:
            before = value.get()  # the default, if no value was set
        except LookupError:
            return None

        def set_again() -> None:
            if value.get() is not before:
                value.set(before)

        return set_again
    if isinstance(value, _TEXT_OR_BYTES) and not value.closed:
        return functools.partial(_rewrite, value, value.getvalue(), value.tell())
    if is_disk_file(value):
        position = position_of(value)
        return None if position is None else functools.partial(_move_back, value, position, _end(value))
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


def _rewrite(file: Any, content: str | bytes, position: int) -> None:
    """Give a file in memory this content, and move to this position. Do nothing if the file is closed."""
    if not file.closed and (file.getvalue(), file.tell()) != (content, position):
        file.seek(0)
        file.truncate()
        file.write(content)
        file.seek(position)


def _end(file: Any) -> int | None:
    """Return the end of a file on a disk that is open to write. The position does not move, because other threads may
    use the file."""
    try:
        if not file.writable():
            return None
        file.flush()
        return os.fstat(file.fileno()).st_size
    except io.UnsupportedOperation:  # it is in memory
        return file.tell()  # type: ignore[no-any-return]


def _move_back(file: Any, position: int, end: int | None) -> None:
    """Move to a position in a file, and remove what was written after `end`. Do nothing if the file is closed."""
    if not file.closed and position_of(file) != position:
        file.seek(position)
        if end is not None:
            file.truncate(end)


def cached_results(function: Any) -> Iterator[Any]:
    """Yield the results that a function under `functools.cache` or `functools.lru_cache` has stored, except
    functions, modules and classes. With a bounded cache, stored arguments may also be among them."""
    if not function.cache_info().currsize:
        return
    own = vars(function)
    found = [x for x in gc.get_referents(function) if x is not own]
    if function.cache_parameters()["maxsize"] is None:
        found = [x for entries in found if type(entries) is dict for x in entries.values()]
    else:  # the function refers to its results, and to a dict of links between them
        found = [x for x in found if not (type(x) is dict and any(type(y) in _LINKS for y in x.values()))]
    yield from (x for x in found if not isinstance(x, _PLAIN))
