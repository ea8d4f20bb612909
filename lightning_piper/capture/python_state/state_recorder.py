"""Record the Python state that a step reads during a trace: attributes of modules, and of plain objects that
modules hold."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.metrics.metric_objects import metric_objects
from lightning_piper.capture.proxies.numbers import NumberInputs, NumberProxy
from lightning_piper.capture.python_state.object_content import ENVIRONMENT, MEMOISED, held_by
from lightning_piper.capture.python_state.side_effects import AppendProxy
from lightning_piper.capture.python_state.state_locations import (
    ALL,
    PROXIES,
    VALUES,
    Guards,
    StateLocation,
    WeakAttributes,
    is_sequence,
    referent,
)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import LIBRARIES as LIBRARY_FOLDERS
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "numpy",
    "lightning_piper",
    "builtins",
    "networkx",
    "sympy",
    "typing_extensions",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Reads of these attributes are not guarded: tensors are inputs of the graph, a `TrainerProxy` replaces the
# Trainer, and the other attributes are for torch's, Lightning's and Piper's own use.
_NOT_STATE = frozenset({
    "_parameters", "_buffers", "_trainer", "_fabric", "_current_fx_name", "_piper_parts",
    "_metric_attributes", "__dict__",
    "__class__", "_forward_hooks_always_called", *(f"{hooks}_with_kwargs" for hooks in _HOOKS),
})  # fmt: skip
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: Python code made the class, so its attributes can be set
# Classes of attributes for which each read from the class returns the same object.
_SAME_EACH_TIME = (types.FunctionType, staticmethod, property)
# Files of the functions through which code reads `os.environ`, and this file.
_AROUND = {x.__code__.co_filename for x in (os.getenv, collections.abc.Mapping.get, lambda: None)}
MANY = 100_000  # the largest number of objects that a recorder visits


def is_library(module: str | None) -> bool:
    """Return whether a Python module of this name is in `LIBRARIES`, so that its objects are not state of the
    user. Lightning's demos count as the user's code. Return False for None."""
    return module is not None and module.partition(".")[0] in LIBRARIES and "demos" not in module


class StateRecorder:
    """A recorder of the Python state that a step reads while it is traced.

    The constructor visits the objects that the module reaches, except metric objects, and `find` visits
    further objects. While `watching` is active, each read of an attribute of a visited object adds a guard.

    Args:
        guards: receives the guards.
        inputs: the numbers that are inputs of the graph.

    Attributes:
        objects: the visited objects: id -> (object, expression that a user would write for it).
        routines: functions among these objects, including hooks.
    """

    def __init__(self, module: nn.Module, guards: Guards, inputs: NumberInputs) -> None:
        self._guards, self._inputs = guards, inputs
        self.objects: dict[int, tuple[Any, str]] = {}
        self.routines: list[Any] = []
        self._classes: set[type] = set()  # classes whose descriptors were visited
        # (id of an object, name of an attribute that has its guards)
        self._noted: set[tuple[int, str]] = set()
        # The trace does not run the code of metric objects. Their states differ between processes.
        self._metrics = {id(x) for metric in metric_objects(module).values() for x in metric.modules()}
        for path, part in module.named_modules():
            self._find(part, f"self.{path}" if path else "self")
        self._module, self._kind = module, type(module)
        self._thread = threading.get_ident()
        self._active = False

    def name_of(self, value: Any) -> str | None:
        """Return the user's expression for a visited object, such as "self.head". Return None for other values,
        and for containers, routines and objects of libraries' classes."""
        found = self.objects.get(id(value))
        if (
            found is None
            or isinstance(value, Mapping | list | tuple | set | frozenset)
            or inspect.isroutine(value)
            or is_library(type(value).__module__)
        ):
            return None
        return found[1]

    def find(self, places: Iterable[StateLocation]) -> None:
        """Visit the objects that are reachable from the values of further places."""
        for place in places:
            self._find(place.get(), place.where)

    def _find(self, value: Any, where: str) -> None:
        """Record the value and the objects that are reachable from it, and the functions among them. Skip
        numbers, texts, tensors, classes and Python modules. Of the objects of libraries' classes, record only
        containers, functions and PyTorch modules. Stop after `MANY` objects in all calls.

        Args:
            where: the expression that a user would write for the value.
        """
        stack = [(value, where)]
        while stack and len(self.objects) < MANY:
            value, where = stack.pop()
            if type(value) in PROXIES:
                value = referent(value)
            if (
                isinstance(value, (*VALUES, torch.Tensor, type, types.ModuleType))
                or id(value) in self.objects
                or id(value) in self._metrics
            ):
                continue
            if isinstance(value, Mapping):
                self.objects[id(value)] = (value, where)
                stack += [(x, f"{where}[{key!r}]") for key, x in value.items()]
                stack += [(key, f"a key of {where}") for key in value]
            elif is_sequence(value) or isinstance(value, Set):
                self.objects[id(value)] = (value, where)
                stack += [(x, f"{where}[{i}]") for i, x in enumerate(value)]
            elif inspect.isroutine(value) or isinstance(value, functools.partial | weakref.ref):
                self.objects[id(value)] = (value, where)
                self.routines.append(value)
                stack += [(x, f"{where}.{name}") for name, x in _parts(value)]
                if isinstance(value, MEMOISED):
                    stack += [(x, f"{where}{name}") for name, x in held_by(value).items()]
            elif found := held_by(value):
                self.objects[id(value)] = (value, where)
                stack += [(x, f"{where}{name}") for name, x in found.items()]
            elif isinstance(value, nn.Module) or not is_library(type(value).__module__):
                self.objects[id(value)] = (value, where)
                if isinstance(value, nn.Module):
                    self.routines += [
                        hook for hooks in _HOOKS for hook in vars(value).get(hooks, {}).values()
                    ]
                entries = getattr(value, "__dict__", {})
                stack += [
                    (x, f"{where}.{name}")
                    for name, x in list(entries.items())
                    if name not in _NOT_STATE | {"_modules"}
                ]
                stack += self._descriptors(type(value))

    def _descriptors(self, kind: type) -> Iterator[tuple[Any, str]]:
        """Yield (descriptor, expression) for the attributes of a class, and of its bases, that are objects of
        the user's classes with a method `__get__`. Reading such an attribute calls this method. Classes that
        were visited before are skipped."""
        for cls in kind.__mro__:
            if cls not in self._classes and not is_library(cls.__module__):
                self._classes.add(cls)
                for name, x in vars(cls).items():
                    if hasattr(type(x), "__get__") and not is_library(type(x).__module__):
                        yield x, f"{cls.__name__}.{name}"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context, guard each attribute of a visited object, and each environment variable, when
        code in this thread reads it. To see the reads, the context replaces `__getattribute__` of the
        objects' classes."""
        objects = (x for x, _ in self.objects.values())
        classes = {
            type(x)
            for x in objects
            if not isinstance(x, nn.Module | Mapping | list | tuple | set | frozenset)
        }
        classes = {c for c in classes if c.__flags__ & HEAP_TYPE and not is_library(c.__module__)}
        with contextlib.ExitStack() as stack:
            patched: list[type] = [nn.Module, *classes]
            for cls in patched:
                stack.enter_context(_reading(cls, self._seen))
            stack.enter_context(_reading_variables(self._seen_variable))
            before, self._inputs.name_of, self._active = self._inputs.name_of, self.name_of, True
            try:
                yield
            finally:
                self._inputs.name_of, self._active = before, False

    def _seen(self, owner: Any, name: str) -> None:
        """Guard an attribute that is being read, if its owner is a visited object and the attribute is not in
        `_NOT_STATE`."""
        # The first two conditions hold for nearly all reads.
        if name in _NOT_STATE and (name != "__dict__" or isinstance(owner, nn.Module)):
            return
        if (id(owner), name) in self._noted or not self._active or threading.get_ident() != self._thread:
            return
        found = self.objects.get(id(owner))
        if found is None or found[0] is not owner:
            return
        self._active = False
        try:
            self._note(owner, name, f"{found[1]}.{name}")
        finally:
            self._active = True
        if name != "__dict__":  # which may have more entries at the next read
            self._noted.add((id(owner), name))

    def _seen_variable(self, owner: Any, name: str) -> None:
        """Guard an environment variable that is being read, unless torch, Python's library or Piper reads
        it."""
        if not self._active or threading.get_ident() != self._thread or owner is not os.environ:
            return
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _AROUND:
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith((*LIBRARY_FOLDERS, "<frozen")):
            self._active = False
            try:
                self._guards.note(StateLocation(f"os.environ[{name!r}]", owner, name))
            finally:
                self._active = True

    def _note(self, owner: Any, name: str, where: str) -> None:
        """Guard the places that decide the value of an attribute: the entry in the object's `__dict__`, or its
        absence there, and the attribute of the class.

        Parameters, buffers and placeholders of a trace get no guard. Attributes of libraries' classes get no
        guard either, except `forward`.

        Args:
            where: the expression that a user would write for the attribute.

        Raises:
            CaptureError: the attribute is a cached property that would store placeholders of numbers.
        """
        entries, attributes = getattr(owner, "__dict__", None), WeakAttributes.of(owner)
        if entries is None:
            place = StateLocation(
                where, owner if attributes is None else attributes, name, attributes is not None
            )
            self._guards.note(place)
            return
        # code such as `vars(config)`, or the `__getattr__` of a class, reads all attributes
        if name == "__dict__":
            for key in entries:
                self._note(owner, key, f"{where.removesuffix('__dict__')}{key}")
            return
        if name in _HOOKS:
            self._guards.note_hooks(where, entries[name])
            return
        if name == "_modules":
            self._guards.note(StateLocation(where, entries[name], ALL))
            return
        if name in entries:
            value = entries[name]
            if type(value) not in (NumberProxy, AppendProxy) and not (
                isinstance(value, torch.Tensor) and _torch.is_traced(value)
            ):
                self._guards.note(StateLocation(where, attributes, name))
            return
        if isinstance(owner, nn.Module):
            if name in owner._modules:
                self._guards.note(StateLocation(where, owner._modules, name))
                return
            if name in owner._parameters or name in owner._buffers:
                store = owner._parameters if name in owner._parameters else owner._buffers
                if store[name] is None:
                    self._guards.note(StateLocation(where, store, name))
                return
        # During the capture, a subclass replaces the module's class.
        kind = self._kind if owner is self._module else type(owner)
        holder = next((c for c in kind.__mro__ if name in vars(c)), None)
        if holder is None:
            # Guard the absence of the attribute, because it may be set later.
            self._guards.note(StateLocation(where, attributes, name))
            return
        if is_library(holder.__module__) and name != "forward":
            return
        value = vars(holder)[name]
        if isinstance(value, functools.cached_property) and self._inputs.given and not self._inputs.plain:
            raise CaptureError(
                f"{user_line()}: the cached property {where} is computed for the first time while the step "
                "is captured, so it would keep values that exist only during the capture. Read it once before, in __init__ or "
                "on_fit_start [PIPER-C004]"
            )
        if not hasattr(type(value), "__set__") and not isinstance(value, functools.cached_property):
            # Guard the absence of the attribute in the object, because it would take precedence over the
            # class's attribute.
            self._guards.note(StateLocation(where, attributes, name))
        if not is_library(holder.__module__) and (
            isinstance(value, _SAME_EACH_TIME) or not hasattr(value, "__get__")
        ):
            self._guards.note(StateLocation(f"{holder.__name__}.{name}", holder, name, item=False))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return (name, object) for each object that a method, a partial function or a weak reference holds.
    Return an empty list for any other function."""
    if isinstance(value, weakref.ref):
        return [("__call__()", value())]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return [("__self__", value.__self__)] if inspect.ismethod(value) else []


@contextlib.contextmanager
def _reading(cls: Any, seen: Callable[[Any, str], None]) -> Iterator[None]:
    """Within this context, call `seen(object, name)` before each read of an attribute of an object of the
    class. If the class cannot be changed, the context has no effect."""
    own = vars(cls).get("__getattribute__")
    inherited = cls.__getattribute__

    def read(self: Any, name: str) -> Any:
        seen(self, name)
        return inherited(self, name)

    try:
        cls.__getattribute__ = read
    except (TypeError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own


@contextlib.contextmanager
def _reading_variables(seen: Callable[[Any, str], None]) -> Iterator[None]:
    """Within this context, call `seen(os.environ, name)` before each lookup of an environment variable. If
    another object has replaced `os.environ`, the context has no effect.

    The context replaces `encodekey` of the object, not `__getitem__` of its class. After a class has changed a
    thousand times, Python 3.13 goes on calling an earlier `__getitem__`.
    """
    variables: Any = os.environ
    if type(variables) is not ENVIRONMENT:
        yield
        return
    inherited = variables.encodekey

    def encodekey(name: str) -> Any:
        if sys._getframe(1).f_code is ENVIRONMENT.__getitem__.__code__:
            seen(variables, name)
        return inherited(name)

    variables.encodekey = encodekey
    try:
        yield
    finally:
        variables.encodekey = inherited
