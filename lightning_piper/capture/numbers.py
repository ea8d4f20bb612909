"""Python numbers that change from step to step: a trace records the arithmetic on them, and each step repeats it.

A step reads counters, rates and other numbers that change from step to step. While it is traced, a `Number` stands for each. What
becomes of it decides how the captured step follows:

- It meets a tensor (`loss * beta`): its value is an input of the graph, a tensor without dimensions, beside those of the batch.
- Python asks for its value (`if`, `int()`, an index, text): the answer is a guard. The capture holds as long as the same question
  gets the same answer, so `if batch_idx % 100 == 0` has two captures and not one for each batch.

What is computed before either happens is Python's own arithmetic, on the values of the day.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from lightning_piper.capture import _torch
from lightning_piper.ir.values import TensorSpec

# Operations whose results are the same bits for a number and for a tensor without dimensions.
_TENSOR_OPERATIONS = frozenset(
    f
    for name in ("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "eq", "ne", "lt", "le", "gt", "ge", "maximum",
                 "minimum")
    for owner in (torch, torch.Tensor)
    if (f := getattr(owner, name, None)) is not None
) | {
    getattr(torch.Tensor, f"__{name}__")
    for name in ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "eq", "ne",
                 "lt", "le", "gt", "ge")
    if hasattr(torch.Tensor, f"__{name}__")
}  # fmt: skip
_MATH = [name for name, f in vars(math).items() if callable(f) and not name.startswith("_")]


@dataclass(frozen=True)
class Answer:
    """A question that Python asked of a number while the step was traced.

    Attributes:
        where: what the number is made of, for messages.
        ask: evaluates it now.
        value: what it was.
    """

    where: str
    ask: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        now = self.ask()
        return type(now) is type(self.value) and bool(now == self.value)


class Inputs:
    """What one captured step does with numbers.

    Attributes:
        numbers: those that are inputs of its graph, in their order there: key -> (expression, dtype of the tensor).
        answers: key -> what Python was told.
        plain: hand out values in place of numbers, each of them a guard: for code that takes no stand-in.
        given: a number was handed out.
        active: the step is being traced. Otherwise a number that the user's code has kept (in a cache) is its value of then.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, tuple[Callable[[], Any], torch.dtype]] = {}
        self.answers: dict[Any, Answer] = {}
        self.plain = self.given = self.active = False
        self._tensors: Sequence[torch.Tensor] = ()

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec((), dtype, ()) for _, dtype in self.numbers.values())

    def values(self, device: torch.device) -> list[torch.Tensor]:
        """The inputs of the next step."""
        return [torch.tensor(value(), dtype=dtype, device=device) for value, dtype in self.numbers.values()]

    def source(self, key: Any, where: str, get: Callable[[], Any]) -> Any:
        """A number that is read: its stand-in."""
        value = get()
        self.answers.setdefault(("type", key), Answer(where, lambda: type(get()), type(value)))
        number = Number(self, ("source", key), where, get, value)
        self.given = self.given or key != "batch_idx"
        return number.ask() if self.plain else number

    @contextlib.contextmanager
    def tracing(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """`tensors` are the graph's inputs for the numbers known so far."""
        before, self._tensors, self.active = self._tensors, tensors, True
        try:
            with contextlib.ExitStack() as stack:
                for name in _MATH:
                    stack.enter_context(mock.patch.object(math, name, _understanding(getattr(math, name))))
                yield
        finally:
            self._tensors, self.active = before, False

    def remember(self) -> Callable[[], None]:
        """Gives a function that makes it what it is now, for a trace that is not used."""
        known = dict(self.numbers), dict(self.answers), self.plain, self.given

        def forget() -> None:
            self.numbers, self.answers, self.plain, self.given = known

        return forget

    def tensor(self, number: Number, dtype: torch.dtype) -> torch.Tensor:
        """The graph's input for a number. One that is new gets its place when the step is traced again."""
        key = (number.key, dtype)
        place = list(self.numbers).index(key) if key in self.numbers else len(self.numbers)
        self.numbers.setdefault(key, (number.get, dtype))
        if place < len(self._tensors):
            return self._tensors[place]
        return torch.tensor(number.value, dtype=dtype)


class Number:
    """Stands for a Python number while a step is traced.

    Attributes:
        key: equal for the same expression.
        where: what it is made of, for messages.
        get: its value now.
        value: its value at the time of the trace.
    """

    def __init__(self, inputs: Inputs, key: Any, where: str, get: Callable[[], Any], value: Any) -> None:
        self.inputs, self.key, self.where, self.get, self.value = inputs, key, where, get, value

    def ask(self) -> Any:
        """Its value, which is a guard from now on."""
        if self.inputs.active or self.inputs.plain:
            self.inputs.answers.setdefault(self.key, Answer(self.where, self.get, self.value))
        return self.value

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, tree = _torch.tree_flatten((args, kwargs or {}))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        fits = function in _TENSOR_OPERATIONS and tensors and not kwargs
        # Beside a tensor without dimensions, another one would decide on the dtype, as no Python number does.
        single = fits and all(x.ndim == 0 for x in tensors)

        def known(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and single:
                return x.reshape(1)
            if not _is_number(x):
                return x
            if not x.inputs.active:
                return x.value
            return x.inputs.tensor(x, _dtype_beside(x.value, tensors)).to(tensors[0].device) if fits else x.ask()

        args, kwargs = _torch.tree_unflatten([known(x) for x in leaves], tree)
        result = function(*args, **kwargs)
        return result.reshape(()) if single else result

    # isinstance sees the class of the value.
    __class__ = property(lambda self: type(self.value))

    def __bool__(self) -> bool:
        return bool(_told(_apply(bool, "bool", self)))

    def __int__(self) -> int:
        return int(_told(_apply(int, "int", self)))

    def __float__(self) -> float:
        return float(_told(_apply(float, "float", self)))

    def __complex__(self) -> complex:
        return complex(self.ask())

    def __index__(self) -> int:
        return operator.index(self.ask())

    def __hash__(self) -> int:
        return hash(self.ask())

    def __str__(self) -> str:
        return str(self.ask())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.ask(), spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.ask(), name)


def _is_number(value: Any) -> bool:
    return type(value) is Number


def holds_number(value: Any) -> bool:
    """Is it one, or a list or tuple that has such?"""
    return any(map(holds_number, value)) if type(value) in (list, tuple) else _is_number(value) and value.inputs.active


def _told(value: Any) -> Any:
    return value.ask() if _is_number(value) else value


def _dtype_beside(value: Any, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """In which a number without dimensions promotes as a Python number does, and has its value exactly where that counts."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    inexact = any(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors)
    return torch.float64 if inexact else torch.get_default_dtype()


def _apply(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """`function(*args)` as a number: at least one argument is one. Its value, if the step is not being traced."""
    args = tuple(_today(x) for x in args)
    kwargs = {k: _today(x) for k, x in kwargs.items()}
    numbers = [x for x in (*args, *kwargs.values()) if _is_number(x)]
    if not numbers:
        return function(*args, **kwargs)

    def get() -> Any:
        return function(*(x.get() if _is_number(x) else x for x in args),
                        **{k: x.get() if _is_number(x) else x for k, x in kwargs.items()})  # fmt: skip

    def form(x: Any) -> Any:
        return x.key if _is_number(x) else (type(x), x)

    value = function(*(x.value if _is_number(x) else x for x in args),
                     **{k: x.value if _is_number(x) else x for k, x in kwargs.items()})  # fmt: skip
    key = (name, tuple(map(form, args)), tuple((k, form(x)) for k, x in sorted(kwargs.items())))
    return Number(numbers[0].inputs, key, ", ".join(dict.fromkeys(x.where for x in numbers)), get, value)


def _today(value: Any) -> Any:
    return value.value if _is_number(value) and not value.inputs.active else value


def _understanding(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that takes numbers as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = any(_is_number(x) for x in (*args, *kwargs.values()))
        return _apply(function, f"math.{function.__name__}", *args, **kwargs) if found else function(*args, **kwargs)

    return call


def _operator(function: Callable[..., Any], name: str, swapped: bool) -> Callable[[Number, Any], Any]:
    def call(self: Number, other: Any) -> Any:
        if not issubclass(type(other), Number | int | float | complex):  # by what it is, not by what it stands for
            return NotImplemented
        return _apply(function, name, *((other, self) if swapped else (self, other)))

    return call


def _unary(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(self: Number, *args: Any) -> Any:
        return _apply(function, name, self, *args)

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "divmod"):
    _function = divmod if _name == "divmod" else getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    if _name == "divmod":
        continue  # gives two numbers: Python falls back on // and % where people write them
    setattr(Number, f"__{_name}__", _operator(_function, _name, swapped=False))
    setattr(Number, f"__r{_name}__", _operator(_function, _name, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _operator(getattr(operator, _name), _name, swapped=False))
for _name, _function in (("neg", operator.neg), ("pos", operator.pos), ("abs", abs), ("invert", operator.invert), ("round", round),
                         ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)):  # fmt: skip
    setattr(Number, f"__{_name}__", _unary(_function, _name))
