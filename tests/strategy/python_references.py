"""Rows of `python_state`: objects that vanish between steps, and weak references to them. The captures must not
keep the objects alive."""

from __future__ import annotations

import weakref
from typing import Any

from tests.strategy.python_state import Net


class Part:
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor


class Slotted:
    __slots__ = ("__weakref__", "factor")

    def __init__(self) -> None:
        self.factor = 2.0


class Dropping:
    """A hook that drops the object `held`."""

    held: Any

    def change(self, step: int) -> None:
        self.held = None


class WeakValues(Dropping, Net):
    captures = 2

    def build(self) -> None:
        self.held = Part()
        self.parts = weakref.WeakValueDictionary(a=self.held)

    def factor(self, batch_idx: int) -> Any:
        return 0.5 if "a" in self.parts else 1.0


class WeakKeys(Dropping, Net):
    captures = 3

    def build(self) -> None:
        self.held = Part()
        self.factors = weakref.WeakKeyDictionary({self.held: 2.0})

    def factor(self, batch_idx: int) -> Any:
        return 0.5 + sum(part.factor * x for part, x in self.factors.items())

    def change(self, step: int) -> None:
        if step == 1:
            self.held.factor = 3.0
        else:
            self.held = None


class WeakItems(Dropping, Net):
    captures = 3

    def build(self) -> None:
        self.held = Part()
        self.weak = weakref.WeakSet([self.held])

    def factor(self, batch_idx: int) -> Any:
        return 0.5 + sum(part.factor for part in self.weak)

    def change(self, step: int) -> None:
        if step == 1:
            self.held.factor = 3.0
        else:
            self.held = None


class WeakReference(Dropping, Net):
    """The step also reads the object itself, so that a guard compares its attributes."""

    def build(self) -> None:
        self.held = Part()
        self.held.inner = Part(3.0)
        self.weak = weakref.ref(self.held.inner)

    def factor(self, batch_idx: int) -> Any:
        return (self.held.inner.factor if self.held else 1.0) + (self.weak() is not None)


class WeakReferenceToSlots(Dropping, Net):
    def build(self) -> None:
        self.held = Slotted()
        self.weak = weakref.ref(self.held)

    def factor(self, batch_idx: int) -> Any:
        return (self.held.factor if self.held else 1.0) + (self.weak() is not None)


class WeakProxy(Dropping, Net):
    captures = 3

    def build(self) -> None:
        self.held = Part()
        self.proxy = weakref.proxy(self.held)

    def factor(self, batch_idx: int) -> Any:
        try:
            return self.proxy.factor
        except ReferenceError:
            return 0.5

    def change(self, step: int) -> None:
        if step == 1:
            self.held.factor = 3.0
        else:
            self.held = None


class Finalizer(Dropping, Net):
    def build(self) -> None:
        self.held = Part()
        self.end = weakref.finalize(self.held, int)

    def factor(self, batch_idx: int) -> Any:
        return 0.5 if self.end.alive else 1.0
