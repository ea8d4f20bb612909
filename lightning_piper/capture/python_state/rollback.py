"""Undo changes that a trace has made to the user's Python objects.

A step that cannot be captured runs uncaptured, and must start from the state before the trace.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import os
import random
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_piper.capture.proxies.numbers import NumberInputs
from lightning_piper.capture.python_state.name_scan import reached_locations
from lightning_piper.capture.python_state.object_content import (
    ATTRIBUTES,
    CSV_WRITER,
    MEMOISED,
    files_behind,
    held_by,
    is_opaque_iterator,
    reaches_outside,
    restoring,
)
from lightning_piper.capture.python_state.state_locations import (
    MISSING,
    PROXIES,
    Guards,
    StateLocation,
    referent,
    taking_from,
)
from lightning_piper.capture.python_state.state_recorder import StateRecorder
from lightning_piper.errors import CaptureError

MANY = 100_000  # the largest number of objects whose state is saved
_LARGE = 2**16  # in bytes; larger arrays are not saved
# Objects of these packages are not state of the user.
_FOREIGN = (
    "lightning_piper",
    "lightning",
    "pytorch_lightning",
    "torch",
    "logging",
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
)
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType,
    torch.Tensor, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


@contextlib.contextmanager
def rollback_on_failure(module: nn.Module, step: str = "training_step") -> Iterator[None]:
    """Restore the user's Python objects if the code in this context raises an `Exception`.

    These are the objects that the module reaches (attributes, containers, and objects of the user's classes,
    with their contents), the globals and closures that the code of the step names, and the environment
    variables. If a memoizing function (`functools.cache`) was called with new arguments, its cache is
    cleared. Parameters and buffers are not restored.

    Args:
        step: the name of the method whose code is searched for globals and closures.

    Raises:
        CaptureError: the code has advanced an iterator, and has not failed or has raised a `CaptureError`.
            The objects are then also restored. If the iterator cannot be reset, the error has a note about it
            and its attribute `late` is True.
    """
    kept = _SavedState(module, step)
    try:
        yield
    except CaptureError as error:
        # If two traces got different values from an iterator, `error` does not name the iterator. So raise an
        # error that names the iterator.
        if moved := list(kept.moved()):
            raise _taken(moved[0], kept.restore()) from error
        kept.restore()
        raise
    except Exception:
        kept.restore()
        raise
    if moved := list(kept.moved()):
        raise _taken(moved[0], kept.restore())


@contextlib.contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """At the end of this context, restore all state that a module and the code of its training step reach, as
    far as `rollback_on_failure` can restore it. It is restored with and without an error."""
    kept = _SavedState(module, "training_step")
    try:
        yield
    finally:
        kept.restore()


def _taken(iterator: str, stuck: list[str]) -> CaptureError:
    """Return the error for a step that takes the next value of an iterator.

    Args:
        iterator: the expression that a user would write for the iterator.
        stuck: the expressions of the iterators that cannot be reset.
    """
    changed = taking_from(iterator)
    if stuck:
        changed.late = True
        changed.add_note(
            f"{stuck[0]} advanced during the capture and cannot be reset, so this run cannot continue. If all devices "
            "are replicas, PiperStrategy(capture='never') runs the step unchanged"
        )
    return changed


class _SavedState:
    """The saved state of all objects that a module and the code of its step reach. The constructor saves the
    state, `moved` shows which iterators have advanced since, and `restore` restores the state."""

    def __init__(self, module: nn.Module, step: str) -> None:
        # id of a visited object -> the object
        self._seen: dict[int, Any] = {}
        # Functions that restore one object or place each.
        self._undo: list[Callable[[], None]] = []
        # (expression for the iterator, iterator, its `_position`)
        self._iterators: list[tuple[str, Any, Any]] = []
        # id of an iterator -> a copy that continues from the saved position
        self._copies: dict[int, Any] = {}
        # (place, its value before the step)
        self._places: list[tuple[StateLocation, Any]] = []
        # (expression, object) of the objects still to save. Recursion instead could exceed Python's limit.
        self._waiting: deque[tuple[str, Any]] = deque()
        for path, part in module.named_modules():
            self._waiting.append((f"self.{path}" if path else "self", part))
        for place in reached_locations(module, step, StateRecorder(module, Guards(), NumberInputs()))[0]:
            self._keep_place(place, place.get())
        while self._waiting and len(self._seen) < MANY:
            self._keep(*self._waiting.popleft())
        self._keep_environment()

    def _keep(self, path: str, value: Any) -> None:
        """Save the state of an object, and queue the objects that it contains. Do nothing if the object was
        visited before, or is of a class in `_PLAIN` or of a package in `_FOREIGN`. Large arrays and arrays of
        objects are not saved.

        Args:
            path: the expression that a user would write for the object.
        """
        if type(value) in PROXIES or isinstance(value, weakref.ref):
            value = referent(value)
        if isinstance(value, types.BuiltinMethodType):  # such as the method `write` of a file
            value = value.__self__
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        if reaches_outside(value) and not is_opaque_iterator(value):
            return
        self._seen[id(value)] = value
        if not isinstance(value, dict | list | tuple):  # their items are visited themselves
            self._wait((f"{path}'s file", x) for x in files_behind(value))
        if isinstance(value, nn.Module):
            self._keep_attributes(path, value, {"_trainer", "_fabric", "_parameters", "_buffers", "_modules"})
        elif isinstance(value, dict | list | deque | set):
            self._keep_container(path, value)
        elif isinstance(value, tuple | frozenset):
            self._wait((f"{path}[{i}]", x) for i, x in enumerate(value))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE and not value.dtype.hasobject:
                self._undo.append(_again(value.__setitem__, (Ellipsis, value.copy())))
        elif isinstance(value, random.Random):
            self._undo.append(_again(value.setstate, (value.getstate(),)))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(_again(value.set_state, (value.get_state(),)))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._undo.append(_again(setattr, (bits, "state", bits.state)))
        elif isinstance(value, torch.Generator):
            self._undo.append(_again(value.set_state, (value.get_state(),)))
        elif isinstance(value, MEMOISED):
            self._keep_memoised(path, value)
        elif (undo := restoring(value)) is not None:
            self._undo.append(undo)
            self._wait((f"{path}{name}", x) for name, x in held_by(value).items())
        elif isinstance(value, CSV_WRITER):
            self._wait((f"{path}{name}", x) for name, x in held_by(value).items())
        elif hasattr(type(value), "__next__"):
            self._iterators.append((path, value, _position(value)))
            if _has_own_source(value):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # itertools warns that it will stop supporting copies
                    self._copies[id(value)] = copy.copy(value)
        elif isinstance(value, ATTRIBUTES) or type(value).__module__.partition(".")[0] not in _FOREIGN:
            self._keep_attributes(path, value, set())
            self._keep_slots(path, value)

    def _keep_place(self, place: StateLocation, before: Any) -> None:
        """Save the value of a place, and queue the value."""

        def undo() -> None:
            if place.get() is not before:
                place.put(before)

        self._undo.append(undo)
        self._places.append((place, before))
        self._wait([(place.where, before)])

    def _keep_environment(self) -> None:
        """Save the environment variables, so that an undo restores them."""
        before = dict(os.environ)

        def undo() -> None:
            for name in os.environ.keys() | before.keys():
                if name not in before:
                    del os.environ[name]
                elif os.environ.get(name) != before[name]:
                    os.environ[name] = before[name]

        self._undo.append(undo)

    def _keep_memoised(self, path: str, function: Any) -> None:
        """Let `restore` clear the cache of a function that was called with new arguments. Queue the results
        that the cache has now."""
        before = function.cache_info().misses

        def undo() -> None:
            if function.cache_info().misses != before:  # the cache may contain tensors without data
                function.cache_clear()

        self._undo.append(undo)
        self._wait((f"{path}{name}", x) for name, x in held_by(function).items())

    def _wait(self, found: Iterable[tuple[str, Any]]) -> None:
        """Queue (expression, object) pairs, except objects without state of their own (`_PLAIN`)."""
        self._waiting.extend(
            (path, x)
            for path, x in found
            if type(x) in PROXIES or isinstance(x, types.BuiltinMethodType) or not isinstance(x, _PLAIN)
        )

    def _keep_attributes(self, path: str, owner: Any, but: set[str]) -> None:
        """Save the attributes of an object except those named in `but`, and queue their values. Do nothing for
        an object without `__dict__`."""
        values = getattr(owner, "__dict__", None)
        if not isinstance(values, dict):
            return
        before = {name: value for name, value in values.items() if name not in but}
        self._wait((f"{path}.{name}", value) for name, value in before.items())

        def undo() -> None:
            now = {name: value for name, value in values.items() if name not in but}
            if _differ(now, before):
                for name in now.keys() - before.keys():
                    del values[name]
                values.update(before)

        self._undo.append(undo)

    def _keep_slots(self, path: str, owner: Any) -> None:
        """Save the values of an object's slots, and queue them."""
        names = [
            name
            for cls in type(owner).__mro__
            for name, x in vars(cls).items()
            if "__slots__" in vars(cls) and isinstance(x, types.MemberDescriptorType)
        ]
        before = {name: getattr(owner, name, MISSING) for name in names}
        self._wait((f"{path}.{name}", value) for name, value in before.items())

        def undo() -> None:
            for name, value in before.items():
                if getattr(owner, name, MISSING) is value:
                    continue
                if value is MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)

        self._undo.append(undo)

    def _keep_container(self, path: str, value: Any) -> None:
        """Save the entries of a container, and queue them."""
        before = copy.copy(dict(value) if isinstance(value, dict) else list(value))
        items = before.items() if isinstance(before, dict) else enumerate(before)
        self._wait((f"{path}[{key!r:.40}]", x) for key, x in items)

        def undo() -> None:
            now = dict(value) if isinstance(value, dict) else list(value)
            if len(now) != len(before) or _differ(now, before):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(before)

        self._undo.append(undo)

    def moved(self) -> Iterator[str]:
        """Yield the expression of each saved iterator that has advanced since the state was saved."""
        for path, value, position in self._iterators:
            if _position(value) != position:
                yield path

    def restore(self) -> list[str]:
        """Restore all saved state. Return the expressions of iterators that have advanced and cannot be
        reset."""
        moved = {id(value): path for path, value, position in self._iterators if _position(value) != position}
        for undo in self._undo:
            undo()
        replaced = {
            key
            for key in moved.keys() & self._copies.keys()
            if self._replace(self._seen[key], self._copies[key])
        }
        return [path for key, path in moved.items() if key not in replaced]

    def _replace(self, old: Any, new: Any) -> bool:
        """Put the copy `new` of the iterator `old` wherever a saved place, list, dict or attribute holds
        `old`. Return whether one of them holds it."""
        found = False
        for place, before in self._places:
            if before is old:
                place.put(new)
                found = True
        for owner in self._seen.values():
            places = owner if isinstance(owner, dict | list | deque) else getattr(owner, "__dict__", None)
            if isinstance(places, dict | list | deque):
                for key, x in list(places.items() if isinstance(places, dict) else enumerate(places)):
                    if x is old:
                        places[key] = new
                        found = True
        return found


def _again(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Return a function that calls `function` with these arguments."""

    def undo() -> None:
        function(*arguments)

    return undo


def _differ(now: Any, before: Any) -> bool:
    """Return whether two dicts, or two lists, hold different objects. Equal but different objects also count
    as a difference."""
    if isinstance(now, Mapping):
        return now.keys() != before.keys() or any(now[key] is not value for key, value in before.items())
    return len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True))


def _has_own_source(iterator: Any) -> bool:
    """Return whether the iterator is over a container or a count, not over another iterator.

    A copy of such an iterator continues from the same position, and does not advance the original.
    """
    if isinstance(iterator, itertools.count | itertools.repeat):
        return True
    return type(iterator).__module__ == "builtins" and operator.length_hint(iterator, -1) >= 0


def _position(iterator: Any) -> Any:
    """Return a value that changes when the iterator advances, if its class shows this.

    For a generator, the value has its instruction and its local variables. For an iterator over a container,
    the value is the number of remaining entries. Otherwise the value has the state or the attributes of the
    iterator.
    """
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return (
            None
            if frame is None
            else (frame.f_lasti, {name: _token(value) for name, value in frame.f_locals.items()})
        )
    if type(iterator).__module__ in ("builtins", "itertools"):
        left = operator.length_hint(iterator, -1)
        if left >= 0:
            return left
        with contextlib.suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = iterator.__reduce__()[1:]
            inner = [x for part in parts for x in (part if isinstance(part, tuple) else (part,))]
            return [_position(x) if hasattr(type(x), "__next__") else _token(x) for x in inner]
    return {name: _token(value) for name, value in getattr(iterator, "__dict__", {}).items()}


def _token(value: Any) -> Any:
    """Return a number or text itself, and the id of any other object."""
    return value if isinstance(value, int | float | str) else id(value)
