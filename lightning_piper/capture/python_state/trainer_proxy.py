"""Watch the Trainer, its optimizers and schedulers during a trace: each value that the step reads there
becomes an input or a guard."""

from __future__ import annotations

import enum
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.proxies.numbers import NumberAnswer, NumberInputs, NumberProxy
from lightning_piper.capture.python_state.state_locations import MISSING, form_of, is_sequence
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

# Names of methods that only read.
READING = frozenset({"get", "keys", "values", "items", "copy", "get_last_lr", "state_dict", "index", "count"})
_VIEWS: Any = (type({}.values()), type({}.items()))
_PLAIN = (type(None), bool, str, bytes, torch.dtype, torch.device, enum.Enum, PurePath, type, slice, range)


class TrainerProxy:
    """A proxy for an object outside of the module, such as the Trainer, that records reads during a trace.

    `self.trainer` returns such a proxy to the step's code. Each attribute or item is again a value that is
    guarded, or a proxy. Writes raise a `CaptureError`.

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

        vars(self).update(_inputs=inputs, _get=now, _where=where, _step=step, _check=check)

    @classmethod
    def of(
        cls,
        value: Any,
        inputs: NumberInputs,
        get: Callable[[], Any],
        where: str,
        step: str,
        check: Callable[[str], None] = lambda what: None,
    ) -> TrainerProxy:
        """Return the proxy for the object `value`. An object has one proxy in a trace, so that `is` has the same
        result as for the objects. A guard says that two expressions still mean the same object.

        Args:
            inputs, get, where, step, check: As in the constructor.
        """
        (_, proxy) = inputs.proxies.setdefault(id(value), (value, cls(inputs, get, where, step, check)))
        known = vars(proxy)
        if known["_where"] != where:
            inputs.answers.setdefault(
                ("same", known["_where"], where), NumberAnswer(where, lambda: get() is known["_get"](), True)
            )
        return proxy  # type: ignore[no-any-return]

    def _take(self, get: Callable[[], Any], where: str) -> Any:
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
            self._inputs.answers.setdefault(("read", where), NumberAnswer(where, get, value))
            return value
        if isinstance(value, int | float):
            return self._inputs.source(where, where, get)
        if isinstance(value, nn.Module):
            return value
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                number = self._inputs.source(where, where, lambda: _item(get))
                if type(number) is NumberProxy:
                    number.of_tensor = True
                return number
            raise CaptureError(
                f"{user_line()}: {self._step} reads the tensor {where}, which is not part of the module. "
                "Keep a copy of it in a buffer (register_buffer), and write the buffer in a hook [PIPER-C004]"
            )
        if inspect.isroutine(value):
            return self._calling(value, get, where)
        # The object may become None later, or another object.
        name_of = self._inputs.name_of

        def kind_of(value: Any) -> tuple[type, str | None]:
            return type(value), name_of(value)

        self._inputs.answers.setdefault(
            ("type", where), NumberAnswer(where, lambda: kind_of(get()), kind_of(value))
        )
        if name_of(value) is not None:
            return value
        return TrainerProxy.of(value, self._inputs, get, where, self._step, self._check)

    def _calling(self, value: Callable[..., Any], get: Callable[[], Any], where: str) -> Callable[..., Any]:
        """Return a function that calls the method `value`, and returns the result in the form of `_take`. The
        function raises a `CaptureError` unless the method's name is in `READING`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if where.rpartition(".")[2] not in READING:
                raise CaptureError(
                    f"{user_line()}: {self._step} calls {where}(). A captured step would do this only once, "
                    "while Piper captures it. Do it in a hook, such as on_train_batch_end [PIPER-C003]"
                )
            given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            return self._take(lambda: get()(*args, **kwargs), f"{where}({given})")

        return call

    def __getattr__(self, name: str) -> Any:
        """Return an attribute in the form of `_take`.

        Raises:
            AttributeError: the object does not have the attribute, and a guard on its absence was added. Or
                the name has two underscores at both ends.
        """
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        try:
            with _torch.with_data():
                getattr(self._get(), name)
        except AttributeError:  # the user's code expects this error, and a hook may set the attribute later
            self._ask(f"hasattr {name!r} of", lambda value: hasattr(value, name))
            raise
        return self._take(lambda: getattr(self._get(), name, MISSING), f"{self._where}.{name}")

    def __getitem__(self, key: Any) -> Any:
        """Return an item in the form of `_take`.

        Raises:
            LookupError: the object does not have the item. A guard on its absence was added.
        """
        self._check(f"{self._where}[{key!r}]")
        try:
            self._get()[key]
        except LookupError:  # the user's code may expect this error, and the item may exist later
            self._ask(f"absence of [{key!r}] in", lambda value: _lacks(value, key))
            raise
        return self._take(lambda: self._get()[key], f"{self._where}[{key!r}]")

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"{self._where}.{name}")

    def _refuse(self, what: str) -> None:
        raise CaptureError(
            f"{user_line()}: {self._step} sets {what}. A captured step would do this only once, while Piper "
            "captures it. Do it in a hook, such as on_train_batch_end [PIPER-C003]"
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse(f"{self._where}[{key!r}]")

    def __len__(self) -> int:
        self._ask_all("len", len)
        return len(self._get())

    def __bool__(self) -> bool:
        self._ask_all("bool", bool)
        return bool(self._get())

    def __contains__(self, key: Any) -> bool:
        self._check(f"{self._where}[{key!r}]")
        return bool(self._ask(f"{key!r} in", lambda value: key in value))

    def __iter__(self) -> Iterator[Any]:
        return self._items(iter)

    def __reversed__(self) -> Iterator[Any]:
        return self._items(lambda items: reversed(list(items)))

    def _items(self, order: Callable[[Iterable[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the keys of a mapping, and guard them. For a list, `values()` or `items()`, iterate
        over the items in the form of `_take`. For any other object, iterate over its items unchanged, and
        guard them.

        Args:
            order: returns an iterator over the objects of its argument, in the order of this iteration.
        """
        self._check(f"{self._where}.keys()")
        value = self._get()
        if isinstance(value, Mapping):
            self._ask("keys of", lambda value: form_of(tuple(value)))
            yield from order(value)
        elif is_sequence(value):
            yield from (self[i] for i in order(range(len(self))))
        elif isinstance(value, _VIEWS):
            for i in order(range(len(self))):
                yield self._take(partial(self._nth, i), f"{self._where}[{i}]")
        else:
            self._ask("content of", lambda value: form_of(tuple(value)))
            yield from order(value)

    def _nth(self, index: int) -> Any:
        """Return an item of `values()` or `items()`."""
        return tuple(self._get())[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._compare(operator.eq, other))

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def _compare(self, comparison: Callable[[Any, Any], Any], other: Any) -> bool:
        """Return the result of a comparison with another object, and guard this result."""
        get, known = _operand(other)
        question = f"{comparison.__name__} {known}"
        return bool(self._ask_all(question, lambda value: bool(comparison(value, get()))))

    def __hash__(self) -> int:
        return int(self._ask_all("hash of", hash))

    def __str__(self) -> str:
        return str(self._ask_all("text of", str))

    def __repr__(self) -> str:
        return str(self._ask_all("repr of", repr))

    def __format__(self, spec: str) -> str:
        return str(self._ask_all(f"text as {spec!r} of", lambda value: format(value, spec)))

    def __add__(self, other: Any) -> Any:
        return self._joined(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._joined(operator.add, other, swapped=True)

    def __or__(self, other: Any) -> Any:
        return self._joined(operator.or_, other)

    def __ror__(self, other: Any) -> Any:
        return self._joined(operator.or_, other, swapped=True)

    def _joined(self, operation: Callable[[Any, Any], Any], other: Any, swapped: bool = False) -> Any:
        """Return the result of an operation with another object, such as a list, in the form of `_take`.

        Args:
            swapped: whether the other object is the first operand.
        """
        get, known = _operand(other)

        def joined() -> Any:
            return operation(get(), self._get()) if swapped else operation(self._get(), get())

        texts = [self._where, known]
        return self._take(joined, f"{operation.__name__}({', '.join(texts[::-1] if swapped else texts)})")

    # `isinstance` sees the object's own class.
    __class__ = property(lambda self: type(self._get()))

    def _ask_all(self, question: str, of: Callable[[Any], Any]) -> Any:
        """Like `_ask`, but the result depends on all items of the object."""
        self._check(f"{self._where}.keys()")
        return self._ask(question, of)

    def _ask(self, question: str, of: Callable[[Any], Any]) -> Any:
        """Return the result of `of` for the current object, and guard this result.

        Args:
            question: a text that identifies the guard, together with the object.
        """
        value = of(self._get())
        self._inputs.answers.setdefault(
            ("read", question, self._where), NumberAnswer(self._where, lambda: of(self._get()), value)
        )
        return value


def _operand(other: Any) -> tuple[Callable[[], Any], str]:
    """Return a function that returns the other operand of an operation, and a text that identifies it."""
    if type(other) is TrainerProxy:
        return other._get, other._where
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
