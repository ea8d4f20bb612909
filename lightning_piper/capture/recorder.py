"""Records what the Python code of a step reads, while it is traced: attributes of modules and of plain objects that they hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import _torch
from lightning_piper.capture.numbers import Number
from lightning_piper.capture.places import ALL, VALUES, Guards, Place, is_sequence

LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "numpy", "lightning_piper", "builtins",
    "networkx", "sympy", "typing_extensions",
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Tensors are inputs of the graph; the Trainer has a stand-in; what Lightning keeps of the call that is under way.
_NOT_STATE = frozenset({
    "_parameters", "_buffers", "_trainer", "_fabric", "_current_fx_name", "_piper_parts", "_metric_attributes", "__dict__",
    "__class__", "_forward_hooks_always_called", *(f"{hooks}_with_kwargs" for hooks in _HOOKS),
})  # fmt: skip
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made by Python code, and may be changed
MANY = 100_000  # objects that are looked through


def is_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in LIBRARIES and "demos" not in module


class Recorder:
    """Attributes:
    objects: what a module's attributes, and other places, hold: id -> (object, how a user would name it).
    """

    def __init__(self, module: nn.Module, guards: Guards, roots: Iterable[Place] = ()) -> None:
        self._guards = guards
        self.objects: dict[int, tuple[Any, str]] = {}
        for path, part in module.named_modules():
            where = f"self.{path}" if path else "self"
            self._find(part, where)
        for place in roots:
            self._find(place.get(), place.where)
        self._thread = threading.get_ident()
        self._active = False

    def _find(self, value: Any, where: str) -> None:
        stack = [(value, where)]
        while stack and len(self.objects) < MANY:
            value, where = stack.pop()
            if isinstance(value, (*VALUES, torch.Tensor, type, types.ModuleType)) or id(value) in self.objects:
                continue
            if isinstance(value, Mapping):
                self.objects[id(value)] = (value, where)
                stack += [(x, f"{where}[{key!r}]") for key, x in value.items()]
            elif is_sequence(value) or isinstance(value, set | frozenset):
                self.objects[id(value)] = (value, where)
                stack += [(x, f"{where}[{i}]") for i, x in enumerate(value)]
            elif isinstance(value, types.MethodType):
                stack.append((value.__self__, f"{where}.__self__"))
            elif isinstance(value, functools.partial):
                stack += [(value.func, where), (value.args, f"{where}.args"), (value.keywords, f"{where}.keywords")]
            elif isinstance(value, nn.Module) or not (is_library(type(value).__module__) or inspect.isroutine(value)):
                self.objects[id(value)] = (value, where)
                entries = getattr(value, "__dict__", {})
                stack += [(x, f"{where}.{name}") for name, x in list(entries.items()) if name not in _NOT_STATE | {"_modules"}]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Classes record reads inside of this context."""
        objects = (x for x, _ in self.objects.values())
        classes = {type(x) for x in objects if not isinstance(x, nn.Module | Mapping | list | tuple | set | frozenset)}
        classes = {c for c in classes if c.__flags__ & HEAP_TYPE and not is_library(c.__module__)}
        with contextlib.ExitStack() as stack:
            patched: list[type] = [nn.Module, *classes]
            for cls in patched:
                stack.enter_context(_reading(cls, self._seen))
            self._active = True
            try:
                yield
            finally:
                self._active = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is read here is not the step's."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def _seen(self, owner: Any, name: str) -> None:
        if not self._active or threading.get_ident() != self._thread:
            return
        if name in _NOT_STATE and (name != "__dict__" or isinstance(owner, nn.Module)):
            return
        found = self.objects.get(id(owner))
        if found is None or found[0] is not owner:
            return
        self._active = False
        try:
            self._note(owner, name, f"{found[1]}.{name}")
        finally:
            self._active = True

    def _note(self, owner: Any, name: str, where: str) -> None:
        entries = getattr(owner, "__dict__", None)
        if entries is None:
            self._guards.note(Place(where, owner, name, item=False))
            return
        if name == "__dict__":  # vars(config), or a __getattr__ of its own
            for key in entries:
                self._note(owner, key, f"{where.removesuffix('__dict__')}{key}")
            return
        if name in _HOOKS:
            self._guards.note_hooks(where, entries[name])
            return
        if name == "_modules":
            self._guards.note(Place(where, entries[name], ALL))
            return
        if name in entries:
            value = entries[name]
            if type(value) is not Number and not (isinstance(value, torch.Tensor) and _torch.is_traced(value)):
                self._guards.note(Place(where, entries, name))
            return
        if isinstance(owner, nn.Module):
            if name in owner._modules:
                self._guards.note(Place(where, owner._modules, name))
                return
            if name in owner._parameters or name in owner._buffers:
                store = owner._parameters if name in owner._parameters else owner._buffers
                if store[name] is None:
                    self._guards.note(Place(where, store, name))
                return
        holder = next((c for c in type(owner).__mro__ if name in vars(c)), None)
        if holder is None:
            self._guards.note(Place(where, entries, name))  # it is missing, and may come
            return
        value = vars(holder)[name]
        if not hasattr(type(value), "__set__"):
            self._guards.note(Place(where, entries, name))  # the object may get its own
        if is_library(holder.__module__) or callable(value) or hasattr(value, "__get__"):
            return
        self._guards.note(Place(f"{holder.__name__}.{name}", holder, name, item=False))


@contextlib.contextmanager
def _reading(cls: type, seen: Callable[[Any, str], None]) -> Iterator[None]:
    own = vars(cls).get("__getattribute__")
    inherited = cls.__getattribute__

    def read(self: Any, name: str) -> Any:
        seen(self, name)
        return inherited(self, name)  # type: ignore[call-arg]

    try:
        cls.__getattribute__ = read  # type: ignore[method-assign, assignment]
    except (TypeError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own  # type: ignore[method-assign]
