"""Undoes what tracing a step has done to the user's Python objects, where the step cannot be captured: it then runs as it is, and
has not run yet."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_piper.capture.numbers import Inputs
from lightning_piper.capture.places import Guards, Place
from lightning_piper.capture.reach import MEMOISED, reached
from lightning_piper.capture.recorder import Recorder
from lightning_piper.errors import CaptureError

MANY = 100_000  # objects that are looked at
_LARGE = 2**16  # bytes of an array that is not kept
# Of these packages no object is the user's own state.
_FOREIGN = ("lightning", "pytorch_lightning", "torch", "logging", "threading", "multiprocessing", "concurrent", "asyncio")
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    torch.Tensor, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


@contextlib.contextmanager
def undone(module: nn.Module, step: str = "training_step") -> Iterator[None]:
    """If what is done inside fails, the objects that a module reaches are as before: its attributes, containers, and objects of the
    user's classes, with what is in them; and so are globals and closures that the code of a step names. Functions that keep what
    they return (`functools.cache`) forget it, if they have been asked for something new.

    Raises:
        CaptureError: an iterator has gone on, and cannot be put back; or nothing failed, and one has gone on.
    """
    kept = _Kept(module, step)
    try:
        yield
    except CaptureError as error:
        # Two traces that got other values differ in ways that do not name the iterator.
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
    """What a module and the code of its training step reach is afterwards as before, as far as `undone` can put it back."""
    kept = _Kept(module, "training_step")
    try:
        yield
    finally:
        kept.restore()


def _taken(iterator: str, stuck: list[str]) -> CaptureError:
    changed = CaptureError(
        f"the step takes the next value of {iterator}, an iterator; a captured step would go on with the one that it got when "
        "it was traced. Let the batch bring the value, or keep it in a buffer"
    )
    if stuck:
        changed.late = True
        changed.add_note(f"{stuck[0]} has gone on while the step was traced, and cannot be put back; give capture='never'")
    return changed


class _Kept:
    """The state of all objects that a module, and the code of its step, reach."""

    def __init__(self, module: nn.Module, step: str) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._iterators: list[tuple[str, Any, Any]] = []
        self._copies: dict[int, Any] = {}
        self._places: list[tuple[Place, Any]] = []
        # Depth first would be stopped by the limit of recursion.
        self._waiting: deque[tuple[str, Any]] = deque()
        for path, part in module.named_modules():
            self._waiting.append((f"self.{path}" if path else "self", part))
        for place in reached(module, step, Recorder(module, Guards(), Inputs()))[0]:
            self._keep_place(place, place.get())
        while self._waiting and len(self._seen) < MANY:
            self._keep(*self._waiting.popleft())

    def _keep(self, path: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
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
            self._keep_memoised(value)
        elif hasattr(type(value), "__next__"):
            self._iterators.append((path, value, _position(value)))
            if _stands_alone(value):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # itertools' own will not be copied for ever
                    self._copies[id(value)] = copy.copy(value)
        elif type(value).__module__.partition(".")[0] not in _FOREIGN:
            self._keep_attributes(path, value, set())

    def _keep_place(self, place: Place, before: Any) -> None:
        def undo() -> None:
            if place.get() is not before:
                place.put(before)

        self._undo.append(undo)
        self._places.append((place, before))
        self._wait([(place.where, before)])

    def _keep_memoised(self, function: Any) -> None:
        before = function.cache_info().misses

        def undo() -> None:
            if function.cache_info().misses != before:  # it may keep tensors without data
                function.cache_clear()

        self._undo.append(undo)

    def _wait(self, found: Iterable[tuple[str, Any]]) -> None:
        self._waiting.extend((path, value) for path, value in found if not isinstance(value, _PLAIN))

    def _keep_attributes(self, path: str, owner: Any, but: set[str]) -> None:
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

    def _keep_container(self, path: str, value: Any) -> None:
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
        """Iterators that have gone on."""
        for path, value, position in self._iterators:
            if _position(value) != position:
                yield path

    def restore(self) -> list[str]:
        """Put everything back; gives the iterators for which that cannot be done."""
        moved = {id(value): path for path, value, position in self._iterators if _position(value) != position}
        for undo in self._undo:
            undo()
        replaced = {key for key in moved.keys() & self._copies.keys() if self._replace(self._seen[key], self._copies[key])}
        return [path for key, path in moved.items() if key not in replaced]

    def _replace(self, old: Any, new: Any) -> bool:
        """Let a copy stand wherever an iterator was found; False if that is nowhere where it may stand."""
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
    def undo() -> None:
        function(*arguments)

    return undo


def _differ(now: Any, before: Any) -> bool:
    """Do containers of equal kinds hold other objects?"""
    if isinstance(now, Mapping):
        return now.keys() != before.keys() or any(now[key] is not value for key, value in before.items())
    return len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True))


def _stands_alone(iterator: Any) -> bool:
    """Is it over a container, or a count, and not over another iterator? A copy then goes on by itself, from the same place."""
    if isinstance(iterator, itertools.count | itertools.repeat):
        return True
    return type(iterator).__module__ == "builtins" and operator.length_hint(iterator, -1) >= 0


def _position(iterator: Any) -> Any:
    """Another one when the iterator has gone on, as far as can be seen."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, {name: _token(value) for name, value in frame.f_locals.items()})
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
    return value if isinstance(value, int | float | str) else id(value)
