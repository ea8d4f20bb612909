"""Lightning's classes by name: it is published as `lightning` and as `pytorch_lightning`, the same classes twice, and users have
Trainers, modules and callbacks of either."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

T = TypeVar("T")

PACKAGES = {
    "lightning.pytorch": "pytorch",
    "pytorch_lightning": "pytorch",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
}


def is_a(value: object, *classes: type[T]) -> TypeGuard[T]:
    """`isinstance` of Lightning's classes, of which `value` may be of the other package's."""
    names = set(map(_name, classes))
    return any(_name(each) in names for each in type(value).__mro__)


def is_exactly(value: object, *classes: type) -> bool:
    """The same for `type(value) in classes`."""
    return _name(type(value)) in map(_name, classes)


def package_of(value: object) -> str:
    """The package that the value's class is derived from, for functions that take what is of their own package alone."""
    return next(package for each in type(value).__mro__ for package in PACKAGES if each.__module__.startswith(f"{package}."))


def _name(of: type) -> tuple[str, str]:
    module = of.__module__
    package = next((package for package in PACKAGES if module.startswith(f"{package}.")), None)
    return (module if package is None else PACKAGES[package] + module[len(package) :]), of.__qualname__
