"""Python numbers that change from step to step: a trace records the arithmetic on them, and each step repeats
this arithmetic.

Examples are counters and rates. During a trace a `NumberProxy` takes the place of each such number. The use
of the `NumberProxy` decides how the captured step follows the number:

- An operation combines it with a tensor (`loss * beta`): its value becomes an input of the graph, a tensor
  without dimensions, after the tensors of the batch.
- Python needs its value (`if`, `int()`, an index, a text): the expression and its value become a guard. The
  capture is valid while the expression has the same value. So `if batch_idx % 100 == 0` needs two captures,
  not one for each batch.

Before one of these two uses, arithmetic on a `NumberProxy` is Python's arithmetic, which each step repeats on
its current values.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.capture.proxies.proxy_classes import Proxy
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError
from lightning_piper.ir.values import TensorSpec

# Operations that give the same bits for a Python number and for a tensor without dimensions.
_TENSOR_OPERATIONS = frozenset(
    f
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "subtract",
        "multiply",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "maximum",
        "minimum",
    )
    for owner in (torch, torch.Tensor)
    if (f := getattr(owner, name, None)) is not None
) | {
    getattr(torch.Tensor, f"__{name}__")
    for name in (
        "add",
        "radd",
        "iadd",
        "sub",
        "rsub",
        "isub",
        "mul",
        "rmul",
        "imul",
        "truediv",
        "rtruediv",
        "itruediv",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
    if hasattr(torch.Tensor, f"__{name}__")
}
# Methods of tensors that do not change a number.
_UNCHANGING = ("item", "detach", "cpu", "clone", "tolist")
_MATH = [name for name, f in vars(math).items() if callable(f) and not name.startswith("_")]


@dataclass(frozen=True)
class NumberAnswer:
    """An expression of numbers whose value the step's Python code used during the trace.

    Attributes:
        where: names the numbers in the expression in messages.
        ask: evaluates the expression with current values.
        value: its value during the trace.
    """

    where: str
    ask: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Return whether the expression still has this value. Return False if its evaluation fails, because the
        next capture then raises the error in the user's code."""
        try:
            now = self.ask()
        except Exception:
            return False
        return type(now) is type(self.value) and bool(now == self.value)


class NumberInputs:
    """The Python numbers that one captured step uses.

    Attributes:
        numbers: The graph's inputs, in their order: key -> (function that evaluates the expression, dtype of
            the tensor).
        answers: Key of an expression -> the expression, whose value Python used. Each is a guard.
        plain: Whether the step gets plain values instead of `NumberProxy`s, with a guard on each value,
            because some code does not accept a `NumberProxy`.
        given: Whether the step has received a number other than `batch_idx`.
        proxies: The objects outside of the module that the step reads in this trace, each with its proxy, by id.
        name_of: Returns the user's expression for an object that the module reaches, and whose reads the trace
            sees, such as "self.helper". None for other objects.
        active: Whether the step is being traced. Outside of a trace, a `NumberProxy` that the user's code has
            kept, as in a cache, acts as the value that it had during the trace.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, tuple[Callable[[], Any], torch.dtype]] = {}
        self.answers: dict[Any, NumberAnswer] = {}
        self.proxies: dict[int, tuple[Any, Any]] = {}
        self.name_of: Callable[[Any], str | None] = lambda value: None
        self.plain = self.given = self.active = False
        self._tensors: Sequence[torch.Tensor] = ()

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec((), dtype, ()) for _, dtype in self.numbers.values())

    def values(self, device: torch.device) -> list[torch.Tensor]:
        """Return the current values of the graph's inputs as new tensors without dimensions, in the order of
        `numbers`."""
        return [torch.tensor(value(), dtype=dtype, device=device) for value, dtype in self.numbers.values()]

    def source(self, key: Any, where: str, get: Callable[[], Any]) -> Any:
        """Return the `NumberProxy` for a number that the step reads, and guard the number's type. If `plain`,
        return the number's value, and guard it."""
        value = get()
        self.answers.setdefault(("type", key), NumberAnswer(where, lambda: type(get()), type(value)))
        number = NumberProxy(self, ("source", key), where, get, value)
        self.given = self.given or key != "batch_idx"
        return number.ask() if self.plain else number

    @contextlib.contextmanager
    def tracing(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within this context, the step is traced, and functions of `math` accept `NumberProxy`s.

        Args:
            tensors: the graph's inputs for the numbers that are known so far.
        """
        before, self._tensors, self.active = self._tensors, tensors, True
        self.proxies = {}
        try:
            with contextlib.ExitStack() as stack:
                for name in _MATH:
                    stack.enter_context(replaced_attribute(math, name, _understanding(getattr(math, name))))
                yield
        finally:
            self._tensors, self.active = before, False
            self.proxies = {}

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the current `numbers`, `answers`, `plain` and `given`. The caller
        calls it after a trace whose result is not used."""
        known = dict(self.numbers), dict(self.answers), self.plain, self.given

        def forget() -> None:
            self.numbers, self.answers, self.plain, self.given = known

        return forget

    def tensor(self, number: NumberProxy, dtype: torch.dtype) -> torch.Tensor:
        """Return the graph's input for a number. A number that is not an input yet becomes one in the next
        trace. In this trace, return its value as a tensor."""
        key = (number.key, dtype)
        index = list(self.numbers).index(key) if key in self.numbers else len(self.numbers)
        self.numbers.setdefault(key, (number.get, dtype))
        if index < len(self._tensors):
            return self._tensors[index]
        return torch.tensor(number.value, dtype=dtype)


class NumberProxy(Proxy):
    """A Python number during a trace.

    Attributes:
        key: equal for equal expressions.
        where: names the numbers in the expression in messages.
        get: evaluates the expression with current values.
        value: its value during the trace.
        of_tensor: whether it replaces a tensor.
    """

    of_tensor = False

    def __init__(
        self, inputs: NumberInputs, key: Any, where: str, get: Callable[[], Any], value: Any
    ) -> None:
        self.inputs, self.key, self.where, self.get, self.value = inputs, key, where, get, value

    def _as_number(self) -> NumberProxy:
        return NumberProxy(self.inputs, self.key, self.where, self.get, self.value)

    def ask(self) -> Any:
        """Return the number's value. During a trace, or if the inputs are `plain`, guard the value."""
        if self.inputs.active or self.inputs.plain:
            self.inputs.answers.setdefault(self.key, NumberAnswer(self.where, self.get, self.value))
        return self.value

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function with numbers among its arguments.

        If the function gives the same bits for a tensor, a real number becomes an input of the graph. In all
        other cases, the function gets the number's value, with a guard. Outside of a trace, the value does not
        have a guard.
        """
        leaves, tree = _torch.tree_flatten((args, kwargs or {}))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and not _is_number(x)]
        fits = function in _TENSOR_OPERATIONS and tensors and not kwargs
        # A Python number does not influence the dtype, but an input of the graph beside other tensors without
        # dimensions would. So these tensors get one dimension.
        single = fits and all(x.ndim == 0 for x in tensors)

        def known(x: Any) -> Any:
            """Return the argument that the function gets in place of `x`."""
            if not _is_number(x):
                return x.reshape(1) if single and isinstance(x, torch.Tensor) else x
            if not x.inputs.active:
                return x.value
            if not fits or isinstance(
                x.value, complex
            ):  # torch has no rule for complex tensors without dimensions
                return x.ask()
            return x.inputs.tensor(x, _dtype_beside(x.value, tensors)).to(tensors[0].device)

        args, kwargs = _torch.tree_unflatten([known(x) for x in leaves], tree)
        result = function(*args, **kwargs)
        return result.reshape(()) if single else result

    # `isinstance` sees the type of the value.
    __class__ = property(lambda self: torch.Tensor if self.of_tensor else type(self.value))

    def __copy__(self) -> NumberProxy:
        return self

    def __deepcopy__(self, memo: Any) -> NumberProxy:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.value), (self.ask(),)

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
        if self.of_tensor and name in _UNCHANGING:
            return self._as_number if name in ("item", "tolist") else lambda: self
        if self.of_tensor and hasattr(torch.Tensor, name):
            raise CaptureError(
                f"{user_line()}: the step uses .{name} of the tensor {self.where}, which is not part of the module. "
                "Compute with its number instead (.item()), or keep a copy of it in a buffer (register_buffer), "
                "and write the buffer in a hook [PIPER-C004]"
            )
        return getattr(self.ask(), name)


def _is_number(value: Any) -> bool:
    return type(value) is NumberProxy


def holds_number(value: Any) -> bool:
    """Return whether the value is a `NumberProxy` of a running trace, or a list or tuple that contains
    one."""
    return (
        any(map(holds_number, value))
        if type(value) in (list, tuple)
        else _is_number(value) and value.inputs.active
    )


def _told(value: Any) -> Any:
    return value.ask() if _is_number(value) else value


def _dtype_beside(value: Any, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of a tensor that stands for a Python number in an operation with `tensors`.

    A float gets the default dtype if no tensor has a floating-point or complex dtype, because torch gives the
    result this dtype. Beside such a tensor, a float is a float64.
    """
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    inexact = any(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors)
    return torch.float64 if inexact else torch.get_default_dtype()


def _apply(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args)` as a `NumberProxy`. At least one argument is a `NumberProxy`. Without a
    running trace, return a plain value."""
    args = tuple(_today(x) for x in args)
    kwargs = {k: _today(x) for k, x in kwargs.items()}
    numbers = [x for x in (*args, *kwargs.values()) if _is_number(x)]
    if not numbers:
        return function(*args, **kwargs)

    def get() -> Any:
        return function(
            *(x.get() if _is_number(x) else x for x in args),
            **{k: x.get() if _is_number(x) else x for k, x in kwargs.items()},
        )

    def form(x: Any) -> Any:
        return x.key if _is_number(x) else (type(x), x)

    value = function(
        *(x.value if _is_number(x) else x for x in args),
        **{k: x.value if _is_number(x) else x for k, x in kwargs.items()},
    )
    key = (name, tuple(map(form, args)), tuple((k, form(x)) for k, x in sorted(kwargs.items())))
    made = NumberProxy(numbers[0].inputs, key, ", ".join(dict.fromkeys(x.where for x in numbers)), get, value)
    made.of_tensor = any(x.of_tensor for x in numbers) and not name.startswith("math.")
    return made


def _today(value: Any) -> Any:
    """Return the plain value of a `NumberProxy` whose trace has ended. Return any other value unchanged."""
    return value.value if _is_number(value) and not value.inputs.active else value


def _understanding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `math` that also accepts a `NumberProxy`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = any(_is_number(x) for x in (*args, *kwargs.values()))
        return (
            _apply(function, f"math.{function.__name__}", *args, **kwargs)
            if found
            else function(*args, **kwargs)
        )

    return call


def _operator(function: Callable[..., Any], name: str, swapped: bool) -> Callable[[NumberProxy, Any], Any]:
    def call(self: NumberProxy, other: Any) -> Any:
        # `type`, because `isinstance` sees the type of the value.
        if not issubclass(type(other), NumberProxy | int | float | complex):
            return NotImplemented
        return _apply(function, name, *((other, self) if swapped else (self, other)))

    return call


def _comparison(function: Callable[..., Any], name: str) -> Callable[[NumberProxy, Any], Any]:
    """Return a comparison whose result is a plain truth value, with a guard on it.

    Torch's settings (`torch.set_grad_enabled`, `torch.autocast(enabled=)`) treat every object except True as
    False. So they would treat a `NumberProxy` of True as False.
    """
    compute = _operator(function, name, swapped=False)

    def call(self: NumberProxy, other: Any) -> Any:
        return _told(compute(self, other))

    return call


def _unary(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(self: NumberProxy, *args: Any) -> Any:
        return _apply(function, name, self, *args)

    return call


# `divmod` is missing because it returns a pair, which a `NumberProxy` cannot represent.
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(NumberProxy, f"__{_name}__", _operator(_function, _name, swapped=False))
    setattr(NumberProxy, f"__r{_name}__", _operator(_function, _name, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(NumberProxy, f"__{_name}__", _comparison(getattr(operator, _name), _name))
for _name, _function in (
    ("neg", operator.neg),
    ("pos", operator.pos),
    ("abs", abs),
    ("invert", operator.invert),
    ("round", round),
    ("trunc", math.trunc),
    ("floor", math.floor),
    ("ceil", math.ceil),
):
    setattr(NumberProxy, f"__{_name}__", _unary(_function, _name))
