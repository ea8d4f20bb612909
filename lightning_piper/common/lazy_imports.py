"""Imports that wait until somebody needs them."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_piper.common.garbage_collection import uncollected

# Threads that read names for the first time import their modules one after another. Otherwise two threads may begin
# with different modules of a cycle of imports, and Python ends one of them with a `_DeadlockError`.
_IMPORTING = threading.RLock()


def make_lazy(package: str, names: Mapping[str, Sequence[str]]) -> None:
    """Give a package names whose modules are imported when the names are first read.

    A name may also be the name of a sub-package. Python assigns a sub-package to its package when anything
    imports it. The name then keeps the value that `names` gives it.

    Args:
        package: The full name of the package, whose `__init__` is running.
        names: Module -> the names that come from it. A name from the package itself is a sub-package.
    """
    known = {name: module for module, those in names.items() for name in those}
    attributes: dict[str, Any] = {name: _LazyName(name, module) for name, module in known.items()}
    attributes["__dir__"] = lambda self: sorted({*vars(self), *known})
    module = sys.modules[package]
    before = {name: vars(module).pop(name) for name in known.keys() & vars(module).keys()}
    module.__class__ = type("LazyPackage", (ModuleType,), attributes)
    for name, value in before.items():
        setattr(module, name, value)


class _LazyName:
    """A name of a lazy package: an attribute of the package's class, which stores values in the package.

    Args:
        name: The name.
        module: The full name of the module whose attribute it is, or of the package if it is a sub-package.
    """

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module

    def __get__(self, package: ModuleType | None, owner: type) -> Any:
        if package is None:  # a read from the class, as by the completion of names in Python's shell
            return self
        values = vars(package)
        if self._name not in values:
            own = self._module == package.__name__
            with _IMPORTING, uncollected():
                found = importlib.import_module(f"{self._module}.{self._name}" if own else self._module)
            values[self._name] = found if own else getattr(found, self._name)
        return values[self._name]

    def __set__(self, package: ModuleType, value: object) -> None:
        imported = isinstance(value, ModuleType) and value.__name__ == f"{package.__name__}.{self._name}"
        if not imported or self._module == package.__name__:
            vars(package)[self._name] = value

    def __delete__(self, package: ModuleType) -> None:
        del vars(package)[self._name]


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with a module: now if the module is imported, or else when it has been imported.

    Args:
        name: The full name of the module.
        call: The function.
    """
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finds one module with the finders after it, and calls a function when the module has run."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.end)
        return spec

    def end(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._call(module)


class _Loader(Loader):
    """Loads a module with its own loader, and then calls a function."""

    def __init__(self, own: Loader, call: Callable[[ModuleType], object]) -> None:
        self._own, self._call = own, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own  # it gives the module's source to readers
        self._own.exec_module(module)
        self._call(module)
