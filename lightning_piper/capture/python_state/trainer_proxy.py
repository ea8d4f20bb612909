"""Watch the Trainer, its optimizers and schedulers during a trace: each value that the step reads there
becomes an input or a guard."""

from __future__ import annotations

import enum
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_piper.capture.proxies.numbers import NumberAnswer, NumberInputs, NumberProxy
from lightning_piper.capture.proxies.proxy_classes import Proxy
from lightning_piper.capture.python_state.state_locations import MISSING, form_of, is_sequence
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

# Names of methods that only read.
READING = frozenset({"get", "keys", "values", "items", "copy", "get_last_lr", "state_dict", "index", "count"})
_JOINING = frozenset({"all_gather", "broadcast", "reduce"})  # methods of a strategy whose results steps use
_VIEWS: Any = (type({}.values()), type({}.items()))
_PLAIN = (type(None), bool, str, bytes, torch.dtype, torch.device, enum.Enum, PurePath, type, slice, range)


class ObjectReads:
    """The reads of an object outside of the module, such as the Trainer, that a trace records.

    Each attribute or item is again a value that is guarded, or a proxy. Writes raise a `CaptureError`.

    Args:
        inputs: Receives the numbers and guards.
        get: Returns the object in its current state. It is called again for each read and each guard.
        where: The expression that a user would write for the object, such as "self.trainer".
        step: Name of the step.
        check: Called with the expression of each read. It may raise an error.
    """

    def __init__(
        self,
        inputs: NumberInputs,
        get: Callable[[], Any],
        where: str,
        step: str,
        check: Callable[[str], None] = lambda what: None,
    ) -> None:
        def now() -> Any:
            with _torch.with_data():  # the Trainer computes metrics when they are read
                return get()

        self.inputs, self.get, self.where, self._step, self._check = inputs, now, where, step, check

    def proxy(self, value: Any) -> TrainerProxy:
        """Return the proxy for the object `value`. An object has one proxy in a trace, so that `is` has the same
        result as for the objects. A guard says that two expressions still mean the same object."""
        (_, proxy) = self.inputs.proxies.setdefault(id(value), (value, _class_for(type(value))(self)))
        known = reads_of(proxy)
        if known.where != self.where:
            self.inputs.answers.setdefault(
                ("same", known.where, self.where),
                NumberAnswer(self.where, lambda: self.get() is known.get(), True),
            )
        return proxy  # type: ignore[no-any-return]

    def take(self, get: Callable[[], Any], where: str) -> Any:
        """Return the value of `get` in the form that the step receives.

        - A value of `_PLAIN`, such as a text: the value itself, with a guard.
        - A number, or a tensor of one element: a `NumberProxy`. If the inputs are plain, a guarded number.
        - A module: the module itself, without a guard.
        - A method or function: a function that calls it (`_calling`).
        - An object that the module also reaches: the object itself, whose reads the trace sees. A guard says
          that it stays this object.
        - Any other object: its `TrainerProxy`.

        Raises:
            CaptureError: the value is a tensor of several elements, or `check` raises it.
        """
        self._check(where)
        with _torch.with_data():
            value = get()
        if isinstance(value, _PLAIN):
            self.inputs.answers.setdefault(("read", where), NumberAnswer(where, get, value))
            return value
        if isinstance(value, int | float):
            return self.inputs.source(where, where, get)
        if isinstance(value, nn.Module):
            return value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value, get, where)
        if inspect.isroutine(value):
            return self._calling(value, get, where)
        # The object may become None later, or another object.
        name_of = self.inputs.name_of

        def kind_of(value: Any) -> tuple[type, str | None]:
            return type(value), name_of(value)

        self.inputs.answers.setdefault(
            ("type", where), NumberAnswer(where, lambda: kind_of(get()), kind_of(value))
        )
        if name_of(value) is not None:
            return value
        return ObjectReads(self.inputs, get, where, self._step, self._check).proxy(value)

    def _of_tensor(self, value: torch.Tensor, get: Callable[[], Any], where: str) -> Any:
        """Return the form in which the step receives a tensor (see `take`)."""
        if value.numel() == 1:
            number = self.inputs.source(where, where, lambda: _item(get))
            if type(number) is NumberProxy:
                number.of_tensor = True
                return number
        if "['params'][" in where:
            raise CaptureError(
                f"{user_line()}: {self._step} reads a parameter from the param_groups of an optimizer. Read it from the "
                "module, such as in self.parameters() [PIPER-C004]"
            )
        raise CaptureError(
            f"{user_line()}: {self._step} reads the tensor {where}, which is not part of the module. "
            "Keep a copy of it in a buffer (register_buffer), and write the buffer in a hook [PIPER-C004]"
        )

    def _calling(self, value: Callable[..., Any], get: Callable[[], Any], where: str) -> Callable[..., Any]:
        """Return a function that calls the method `value`, and returns the result in the form of `take`. The
        function raises a `CaptureError` unless the method's name is in `READING`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = where.rpartition(".")[2]
            if name in _JOINING:
                self.refuse(
                    f"calls {where}()",
                    "To join the samples of all processes, use piper.gather_samples. Otherwise call it in a hook, such as "
                    "on_train_batch_start",
                )
            if name not in READING:
                self.refuse(f"calls {where}()")
            given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            return self.take(lambda: get()(*args, **kwargs), f"{where}({given})")

        return call

    def attribute(self, name: str) -> Any:
        """Return an attribute in the form of `take`.

        Raises:
            AttributeError: the object does not have the attribute, and a guard on its absence was added.
        """
        try:
            with _torch.with_data():
                getattr(self.get(), name)
        except AttributeError:  # the user's code expects this error, and a hook may set the attribute later
            self.ask(f"hasattr {name!r} of", lambda value: hasattr(value, name))
            raise
        return self.take(lambda: getattr(self.get(), name, MISSING), f"{self.where}.{name}")

    def item(self, key: Any) -> Any:
        """Return an item in the form of `take`.

        Raises:
            LookupError: the object does not have the item. A guard on its absence was added.
        """
        self._check(f"{self.where}[{key!r}]")
        try:
            self.get()[key]
        except LookupError:  # the user's code may expect this error, and the item may exist later
            self.ask(f"absence of [{key!r}] in", lambda value: _lacks(value, key))
            raise
        return self.take(lambda: self.get()[key], f"{self.where}[{key!r}]")

    def holds(self, key: Any) -> bool:
        """Return whether `key in` the object, and guard this result."""
        self._check(f"{self.where}[{key!r}]")
        return bool(self.ask(f"{key!r} in", lambda value: key in value))

    def refuse(self, action: str, advice: str = "Do it in a hook, such as on_train_batch_end") -> NoReturn:
        """Raise the error for an action that a captured step cannot repeat, such as "sets self.trainer.x"."""
        raise CaptureError(
            f"{user_line()}: {self._step} {action}. A captured step would do this only once, while Piper "
            f"captures it. {advice} [PIPER-C003]"
        )

    def refuse_operation(self, name: str) -> NoReturn:
        """Raise the error for a special method of the object's class that a proxy does not have, or for a
        copy."""
        raise CaptureError(
            f"{user_line()}: {self._step} uses {name} of {self.where}, which Piper cannot repeat in a captured "
            "step. Use the object in a hook, such as on_train_batch_start, and keep the result as an attribute "
            "or a buffer [PIPER-C004]"
        )

    def items(self, order: Callable[[Iterable[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the keys of a mapping, and guard them. For a list, `values()` or `items()`, iterate
        over the items in the form of `take`. For any other object, iterate over its items unchanged, and
        guard them.

        Args:
            order: returns an iterator over the objects of its argument, in the order of this iteration.
        """
        self._check(f"{self.where}.keys()")
        value = self.get()
        if isinstance(value, Mapping):
            self.ask("keys of", lambda value: form_of(tuple(value)))
            yield from order(value)
        elif is_sequence(value):
            yield from (self.item(i) for i in order(range(self.ask_all("len", len))))
        elif isinstance(value, _VIEWS):
            for i in order(range(self.ask_all("len", len))):
                yield self.take(partial(self._nth, i), f"{self.where}[{i}]")
        else:
            self.ask("content of", lambda value: form_of(tuple(value)))
            yield from order(value)

    def _nth(self, index: int) -> Any:
        """Return an item of `values()` or `items()`."""
        return tuple(self.get())[index]

    def compare(self, comparison: Callable[[Any, Any], Any], other: Any) -> bool:
        """Return the result of a comparison with another object, and guard this result."""
        get, known = _operand(other)
        question = f"{comparison.__name__} {known}"
        return bool(self.ask_all(question, lambda value: bool(comparison(value, get()))))

    def joined(self, operation: Callable[[Any, Any], Any], other: Any, swapped: bool = False) -> Any:
        """Return the result of an operation with another object, such as a list, in the form of `take`.

        Args:
            swapped: whether the other object is the first operand.
        """
        get, known = _operand(other)

        def joined() -> Any:
            return operation(get(), self.get()) if swapped else operation(self.get(), get())

        texts = [self.where, known]
        return self.take(joined, f"{operation.__name__}({', '.join(texts[::-1] if swapped else texts)})")

    def ask_all(self, question: str, of: Callable[[Any], Any]) -> Any:
        """Like `ask`, but the result depends on all items of the object."""
        self._check(f"{self.where}.keys()")
        return self.ask(question, of)

    def ask(self, question: str, of: Callable[[Any], Any]) -> Any:
        """Return the result of `of` for the current object, and guard this result.

        Args:
            question: a text that identifies the guard, together with the object.
        """
        value = of(self.get())
        self.inputs.answers.setdefault(
            ("read", question, self.where), NumberAnswer(self.where, lambda: of(self.get()), value)
        )
        return value


class TrainerProxy(Proxy):
    """A proxy for an object outside of the module. `self.trainer` returns such a proxy to the step's code.

    It has the attributes of the object. `_class_for` adds the special methods of the object's class.

    Args:
        reads: the reads of the object.
    """

    __slots__ = ("__weakref__", "_reads")

    def __init__(self, reads: ObjectReads) -> None:
        object.__setattr__(self, "_reads", reads)

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute of the object in the form of `ObjectReads.take`.

        Raises:
            AttributeError: the object does not have the attribute.
        """
        reads = reads_of(self)
        if name == "__class__":  # `isinstance` sees the object's own class
            return reads.ask("class of", type)
        if name.startswith("__") and name.endswith("__") and name != "__dict__":
            return object.__getattribute__(self, name)  # as `_class_for` copies it
        return reads.attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        reads_of(self).refuse(f"sets {reads_of(self).where}.{name}")

    def __delattr__(self, name: str) -> None:
        reads_of(self).refuse(f"deletes {reads_of(self).where}.{name}")

    def __bool__(self) -> bool:
        return bool(reads_of(self).ask_all("bool", bool))

    def __eq__(self, other: object) -> bool:
        return reads_of(self).compare(operator.eq, other)

    def __lt__(self, other: Any) -> bool:
        return reads_of(self).compare(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return reads_of(self).compare(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return reads_of(self).compare(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return reads_of(self).compare(operator.ge, other)

    def __hash__(self) -> int:
        return int(reads_of(self).ask_all("hash of", hash))

    def __str__(self) -> str:
        return str(reads_of(self).ask_all("text of", str))

    def __repr__(self) -> str:
        return str(reads_of(self).ask_all("repr of", repr))

    def __format__(self, spec: str) -> str:
        return str(reads_of(self).ask_all(f"text as {spec!r} of", lambda value: format(value, spec)))

    def __dir__(self) -> list[str]:
        return list(reads_of(self).ask("names of", dir))

    def __copy__(self) -> NoReturn:
        reads_of(self).refuse_operation("a copy")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        reads_of(self).refuse_operation("a copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        reads_of(self).refuse_operation("a pickle")


def reads_of(proxy: TrainerProxy) -> ObjectReads:
    """Return the reads of the object that a proxy stands for."""
    return object.__getattribute__(proxy, "_reads")  # type: ignore[no-any-return]


# Special methods that a proxy has if the object's class has a method of this name.
_METHODS: dict[str, Callable[..., Any]] = {
    "__len__": lambda self: reads_of(self).ask_all("len", len),
    "__contains__": lambda self, key: reads_of(self).holds(key),
    "__getitem__": lambda self, key: reads_of(self).item(key),
    "__setitem__": lambda self, key, value: reads_of(self).refuse(f"sets {reads_of(self).where}[{key!r}]"),
    "__delitem__": lambda self, key: reads_of(self).refuse(f"deletes {reads_of(self).where}[{key!r}]"),
    "__iter__": lambda self: reads_of(self).items(iter),
    "__reversed__": lambda self: reads_of(self).items(lambda items: reversed(list(items))),
    "__add__": lambda self, other: reads_of(self).joined(operator.add, other),
    "__or__": lambda self, other: reads_of(self).joined(operator.or_, other),
    "__ror__": lambda self, other: reads_of(self).joined(operator.or_, other, swapped=True),
    "__call__": lambda self, *args, **kwargs: reads_of(self).refuse(f"calls {reads_of(self).where}()"),
}
# Special names that a proxy does not take from the object's class.
_OWN = frozenset({
    *vars(TrainerProxy), *vars(object), "__new__", "__init__", "__getattr__", "__dict__", "__weakref__", "__slots__",
    "__del__", "__getstate__", "__setstate__", "__prepare__", "__array__", "__array_ufunc__", "__array_function__",
    "__array_priority__", "__array_interface__", "__array_struct__", "__torch_function__",
}) - {"__doc__", "__module__"}  # fmt: skip
_CLASSES: dict[type, type[TrainerProxy]] = {}  # class of an object -> class of its proxies


def _class_for(kind: type) -> type[TrainerProxy]:
    """Return a `TrainerProxy` class with the special names of `kind`, so that `isinstance`, `callable` and
    `hasattr` have the results that they have for the object."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    members: dict[str, Any] = {"__slots__": ()}
    for base in reversed(kind.__mro__[:-1]):
        for name, value in vars(base).items():
            if name.startswith("__") and name.endswith("__") and name not in _OWN:
                members[name] = _member(name, value)
    if "__add__" in members:  # a list adds another list only if it is one
        members["__radd__"] = lambda self, other: reads_of(self).joined(operator.add, other, swapped=True)
    if kind.__hash__ is None:
        members["__hash__"] = None
    return _CLASSES.setdefault(kind, type(kind.__name__, (TrainerProxy,), members))


def _member(name: str, value: Any) -> Any:
    """Return a special name of a proxy's class. A method is the proxy's own, or raises an error. Other values,
    such as the fields of a dataclass, stay as the object's class has them."""
    if name in _METHODS:
        return _METHODS[name]
    if not callable(value) or isinstance(value, type):
        return value
    return lambda self, *args, **kwargs: reads_of(self).refuse_operation(name)


def _operand(other: Any) -> tuple[Callable[[], Any], str]:
    """Return a function that returns the other operand of an operation, and a text that identifies it."""
    if isinstance(other, TrainerProxy):
        return reads_of(other).get, reads_of(other).where
    return lambda: other, repr(form_of(other))


def _lacks(value: Any, key: Any) -> bool:
    """Return whether an object does not have an item."""
    try:
        value[key]
    except LookupError:
        return True
    return False


def _item(get: Callable[[], Any]) -> Any:
    """Return the number in the tensor that `get` returns."""
    with _torch.with_data():
        return get().item()
