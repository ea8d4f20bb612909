"""Compare Lightning's classes by name, across its two packages.

Lightning is published as `lightning` and as `pytorch_lightning`, with the same classes twice. Users have
Trainers, modules and callbacks of either.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

T = TypeVar("T")

# Name of a package -> a name that is the same for both publications.
PACKAGES = {
    "lightning.pytorch": "pytorch",
    "pytorch_lightning": "pytorch",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
}


def is_a(value: object, *classes: type[T]) -> TypeGuard[T]:
    """`isinstance` for Lightning's classes. The class of `value` may come from the other package."""
    names = set(map(_name, classes))
    return any(_name(each) in names for each in type(value).__mro__)


def is_exactly(value: object, *classes: type) -> bool:
    """`type(value) in classes`, across the two packages."""
    return _name(type(value)) in map(_name, classes)


def package_of(value: object) -> str:
    """Return the package from which the value's class is derived, such as "pytorch_lightning".

    Functions of a package accept only objects of the same package.

    Raises:
        StopIteration: No class of the value comes from Lightning.
    """
    return next(
        package
        for each in type(value).__mro__
        for package in PACKAGES
        if each.__module__.startswith(f"{package}.")
    )


def _name(of: type) -> tuple[str, str]:
    module = of.__module__
    package = next((package for package in PACKAGES if module.startswith(f"{package}.")), None)
    return (module if package is None else PACKAGES[package] + module[len(package) :]), of.__qualname__
