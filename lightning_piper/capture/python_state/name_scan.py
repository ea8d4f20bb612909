"""Find globals and closures that the code of a step names. The search reads the bytecode of the step, and the
bytecode of all functions of the user that this code names.

A name may be on a branch that the step does not take. An unneeded guard only costs a capture, but a missing
guard gives a wrong result.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.proxies.deferred_numbers import Namespace
from lightning_piper.capture.python_state.object_content import MEMOISED
from lightning_piper.capture.python_state.state_locations import PROXIES, StateLocation
from lightning_piper.capture.python_state.state_recorder import StateRecorder, is_library
from lightning_piper.common.user_lines import is_installed

# Names of bytecode instructions, by the kind of name that they read or write.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM")
_IMPORT, _TEXT = "IMPORT_NAME", "LOAD_CONST"
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


def is_users(code: types.CodeType) -> bool:
    """Return whether the code is the user's, not an installed package's."""
    return is_users_file(code.co_filename)


def is_users_file(file: str) -> bool:
    """Return whether code of this file is the user's: not Piper's, not an installed package's, and not
    Python's."""
    return not file.startswith(_OWN) and not is_installed(file) and "/lib/python3" not in file


_OWN = (str(Path(__file__).parents[2]) + "/", "<frozen")


def reached_locations(
    module: nn.Module, step: str, recorder: StateRecorder
) -> tuple[list[StateLocation], list[Namespace]]:
    """Return the places and namespaces of `named_locations`, including those that are named by the code of
    objects in these places.

    Args:
        recorder: has the objects that the module reaches. The function adds the objects in the places.
    """
    (named, namespaces), known = named_locations(module, step, recorder), -1
    while known != len(recorder.objects):  # newly found objects may have code that names more places
        known = len(recorder.objects)
        recorder.find(named)
        named, namespaces = named_locations(module, step, recorder)
    return named, namespaces


def named_locations(
    module: nn.Module, step: str, recorder: StateRecorder
) -> tuple[list[StateLocation], list[Namespace]]:
    """Return the places that a step's code names and for which a guard is useful, and the namespaces of this
    code.

    Places are globals, cells of closures, default arguments, and attributes of classes and Python modules. A
    namespace is (a globals dict, the names that the code calls from it, except names that the code compares by
    `is`, such as `float` in `type(x) is float`).

    Args:
        module, step: the module, and the name of its step.
        recorder: has further functions whose code is read, and objects. If the class of such an object has an
            attribute that the code names, this attribute is a place.
    """
    found = _NameScan(module, {type(x) for x, _ in recorder.objects.values()})
    for routine in recorder.routines:
        found.follow(routine)
    found.follow(getattr(type(module), step, None))
    # Functions that were assigned to the object: self.training_step = ..., self.loss = lambda ...
    for name, value in vars(module).items():
        if type(value) not in PROXIES and (inspect.isroutine(value) or name == step):
            found.follow(value)
    found.run()
    namespaces = [(names, called - found.compared[key]) for key, (names, called) in found.namespaces.items()]
    return list(found.places.values()), namespaces


class _NameScan:
    """A search for the places that code names, which starts at the functions passed to `follow`.

    Args:
        module: the module of the step. If its class, or the class of a submodule, has an attribute that the
            code names, the attribute is a place.
        others: further classes whose attributes are places if the code names them.

    Attributes:
        places: Key -> place.
        namespaces: Id of a globals dict -> the dict, and the names that the code calls from it.
        compared: The same key -> the names that the code compares by `is`.
    """

    def __init__(self, module: nn.Module, others: Iterable[type]) -> None:
        self.places: dict[Any, StateLocation] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.compared: dict[int, set[str]] = {}
        self._seen: set[int] = set()
        self._waiting: list[types.FunctionType] = []
        classes = (c for kind in (*map(type, module.modules()), *others) for c in kind.__mro__)
        self._classes: list[type] = list(dict.fromkeys(c for c in classes if not is_library(c.__module__)))
        self._made: set[type] = set()  # classes that the code names; the recorder may not know their objects
        # attributes that the code names, and methods that Python calls without a name in the code
        self._named: set[str] = {"forward", "__call__", "__get__"}
        # Python modules and functions whose attributes are places if the code names them
        self._holders: list[tuple[str, Any]] = []

    def follow(self, value: Any) -> bool:
        """Queue the code of a function, of a property, or of an object that wraps a function, if the code is
        the user's and was not queued before. Return whether the value is one of these; False for a property
        without functions."""
        value = inspect.unwrap(value) if inspect.isroutine(value) and hasattr(value, "__wrapped__") else value
        if isinstance(value, functools.partial):
            return self.follow(value.func)
        if isinstance(value, property):
            return any([self.follow(f) for f in (value.fget, value.fset) if f is not None])
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            if id(value) not in self._seen and is_users(value.__code__):
                self._seen.add(id(value))
                self._waiting.append(value)
            return True
        return inspect.isroutine(value)

    def run(self) -> None:
        """Read the code of the queued functions, and of the functions that this code names, until the code
        names nothing new."""
        before = -1
        while self._waiting or before != len(self._named):
            before = len(self._named)
            while self._waiting:
                self._read(self._waiting.pop())
            for where, holder in [*((c.__name__, c) for c in self._classes), *self._holders]:
                for name in self._named & vars(holder).keys():
                    item = isinstance(holder, types.ModuleType)
                    self._take(
                        StateLocation(f"{where}.{name}", vars(holder) if item else holder, name, item),
                        vars(holder)[name],
                    )

    def _read(self, function: types.FunctionType) -> None:
        """Record the places that the code of one function names: cells of its closure, its defaults, globals,
        and Python modules that it imports."""
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            if not _is_empty(cell):
                self._take(
                    StateLocation(f"{name} of {function.__qualname__}", cell, "cell_contents", item=False),
                    cell.cell_contents,
                )
        self.namespaces.setdefault(id(function.__globals__), (function.__globals__, set()))[1].update(
            _called(function.__code__)
        )
        self.compared.setdefault(id(function.__globals__), set()).update(_compared(function.__code__))
        name = function.__qualname__
        if function.__defaults__ is not None or function.__kwdefaults__ is not None:
            for attribute in ("__defaults__", "__kwdefaults__"):
                place = StateLocation(f"a default argument of {name}", function, attribute, item=False)
                self._take(place, getattr(function, attribute))
        if vars(function):
            self._holders.append((name, function))
        for kind, name in _instructions(function.__code__):
            if kind in (*_ATTRIBUTES, _TEXT):
                self._named.add(name)
            if kind == _IMPORT:
                self._take_module(name, function.__globals__.get("__package__"))
            elif kind not in _ATTRIBUTES and name in function.__globals__:
                place = StateLocation(f"{name} ({function.__module__})", function.__globals__, name)
                self._take(place, function.__globals__[name])

    def _take_module(self, name: str, package: str | None) -> None:
        """Take a Python module that a function imports, if it is already loaded (see `_take`).

        Args:
            name: the name in the import statement, which may be relative to `package`.
        """
        for known in (name, f"{package}.{name}".rstrip(".")):
            if known in sys.modules:
                self._take(StateLocation(known, sys.modules, known), sys.modules[known])

    def _take(self, place: StateLocation, value: Any) -> None:
        """Record a place that the code names, if a guard on its value is useful, and queue the value's code.

        - A Python module: not recorded. Its attributes that the code names are recorded (`_holders`).
        - A class: recorded, and also its attributes that the code names (`_classes`).
        - A method: recorded only if the code names its class (`_made`). `StateRecorder` guards other methods.
        - Any other object with `__get__`, such as a bound method or a slot: not recorded.
        - Any other value: recorded, and also the attributes of its class that the code names.

        Attributes of libraries' modules and classes are not recorded in this way.
        """
        if place.key in self.places:
            return
        if type(value) in PROXIES:
            self.places[place.key] = place
            return
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None) or "/site-packages/"
            if id(value) not in self._seen and not is_library(value.__name__) and not is_installed(file):
                self._seen.add(id(value))
                self._holders.append((value.__name__, value))
            return
        if isinstance(value, type):
            self.places[place.key] = place
            if id(value) not in self._seen and not is_library(value.__module__):
                self._seen.add(id(value))
                more = [c for c in value.__mro__ if not is_library(c.__module__) and c not in self._classes]
                self._classes += more
                self._made.update(more)
                if issubclass(value, torch.autograd.Function):  # torch calls these methods
                    for name in ("setup_context", "backward"):
                        self.follow(getattr(value, name))
            return
        of_class = isinstance(place.owner, type)
        made = of_class and place.owner in self._made
        method = self.follow(value) and of_class and place.name != "__call__" and type(value) is not MEMOISED
        if method and not made:
            return  # the recorder guards methods when the step reads them
        same = (types.FunctionType, MEMOISED, *((property, staticmethod) if made else ()))
        if hasattr(type(value), "__get__") and type(value) not in same:
            return
        self.places[place.key] = place
        if not is_library(type(value).__module__):
            self._classes += [
                c for c in type(value).__mro__ if not is_library(c.__module__) and c not in self._classes
            ]


@functools.lru_cache(maxsize=4096)
def _called(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and builtins that the code, or code inside of it, calls. Python marks an
    instruction that loads a function to call it."""
    nested = (_called(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    loads = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL" and (i.arg or 0) & 1)
    return frozenset(i.argval for i in loads).union(*nested)


@functools.lru_cache(maxsize=4096)
def _compared(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and builtins that are the second operand of `is` in the code, or in code
    inside of it."""
    nested = (_compared(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    pairs = itertools.pairwise(i for i in dis.get_instructions(code) if i.opname != "CACHE")
    found = (a.argval for a, b in pairs if a.opname == "LOAD_GLOBAL" and b.opname == "IS_OP")
    return frozenset(found).union(*nested)


def _is_empty(cell: types.CellType) -> bool:
    """Return whether a variable of a closure has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return (operation, name) for the instructions that read or write names, and for texts that may be
    names, in the code and in nested code. Each pair occurs once. An example is ("LOAD_GLOBAL", "BETA")."""

    def within(code: types.CodeType) -> Iterator[tuple[str, str]]:
        """Yield the pairs in the order of the code, with repetitions."""
        for instruction in dis.get_instructions(code):
            if instruction.opname in (*_ATTRIBUTES, *_GLOBALS, _IMPORT):
                yield instruction.opname, instruction.argval
            elif (
                instruction.opname == "LOAD_CONST"
                and isinstance(instruction.argval, str)
                and instruction.argval.isidentifier()
            ):
                # the text may be a name: getattr(config, "beta"), globals()["BETA"]
                yield _TEXT, instruction.argval
        nested: Iterable[Any] = code.co_consts
        for constant in nested:
            if isinstance(constant, types.CodeType):
                yield from within(constant)

    return tuple(dict.fromkeys(within(code)))
