"""Numbers that Python takes out of tensors (`loss.item()`, `float(loss)`, `counts.tolist()`) while a step is
traced without values.

A `DeferredNumber` holds the tensor in place of the number. Arithmetic on it gives another `DeferredNumber`,
computed as Python would, in float64 and int64, by operations of the graph. An operation on a `DeferredNumber`
and a tensor gives a tensor, and `self.log` records it as a tensor. Python itself never gets the value. If the
step's control flow needs the value (`if`, an index, a loop count), Piper raises an error. A text that is only printed
or logged shows a fixed phrase instead of the value. Any other text of the value is an error.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import logging
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from lightning_piper.capture.proxies.data_dependent_shapes import SELECTING, DataDependentTensor
from lightning_piper.capture.proxies.numbers import NumberProxy, holds_number
from lightning_piper.capture.proxies.proxy_classes import Proxy, class_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.capture.user_code.shown_texts import is_only_shown
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

LATER = "<value known after the step>"  # the phrase that printed and logged texts show instead of the value
# A conversion of a number in a text for `logging`: `%.3f`, `%(count)d`
_CONVERSION = re.compile(r"%%|%(\(\w+\))?[-+ #0]*\d*(?:\.\d*)?[hlL]?[diouxXeEfFgGc]")
MANY = 1024  # the most elements that `tolist` may return
# These functions take sizes one by one, and check them before any torch function mode sees the call.
_SIZED = (
    *((torch, name) for name in ("zeros", "ones", "empty", "rand", "randn")),
    *((torch.Tensor, name) for name in ("new_zeros", "new_ones", "new_empty", "expand")),
)
# the globals of some code, and the global names that the code calls
Namespace = tuple[dict[str, Any], set[str]]
_CONVERSIONS = (torch.tensor, torch.as_tensor, torch.asarray)
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)
_TEXTS = (torch.Tensor.__format__, torch.Tensor.__repr__, torch.Tensor.__str__)
# dtype of a deferred number -> class of the Python number
_CLASSES: dict[torch.dtype, type] = {
    torch.float64: float,
    torch.int64: int,
    torch.bool: bool,
    torch.complex128: complex,
}


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function in a step.

    If `item` needs a tensor's value, return a `DeferredNumber`. If `tolist` does, return a list of such
    numbers, unless the list would have more than `MANY` elements. If an operation that selects elements needs
    a value, return a `DataDependentTensor`. The text of a traced tensor is `text_of_value`. Any other call that
    needs a value raises torch's own error. Conversions to tensors (`torch.tensor`) accept deferred numbers.

    Raises:
        CaptureError: `bool` or `numpy` was called on a tensor without values, or its text is not only shown.
    """
    if function in _CONVERSIONS and args and (holds_deferred(args[0]) or holds_number(args[0])):
        return _made(args[0], *args[1:], **kwargs)
    if function in _TEXTS and _torch.is_traced(args[0]):
        return text_of_value()
    if function in _ARRAYS and _torch.is_traced(args[0]):
        raise CaptureError(
            f"{user_line()}: this line makes a numpy array of a tensor, but tensors have no values while the step is "
            "captured. Compute with tensors, or make the array in a hook [PIPER-C001]"
        )
    try:
        return function(*args, **kwargs)
    except _torch.WITHOUT_VALUES:
        if function is torch.Tensor.__bool__:
            raise refusal(decides=True) from None
        if function is torch.Tensor.item:
            return deferred(args[0])
        if function is torch.Tensor.tolist and args[0].numel() <= MANY:
            return _listed(args[0])
        if function in SELECTING:
            return DataDependentTensor(function, args, kwargs, user_line())
        raise


def deferred(tensor: torch.Tensor) -> DeferredNumber:
    """Return a deferred number for the value of a one-element tensor. It holds a detached copy of the tensor, in
    the dtype that matches Python's number: bool, int64, float64 or complex128."""
    kinds = ((tensor.dtype == torch.bool, torch.bool), (tensor.is_complex(), torch.complex128))
    dtype = next(
        (d for is_it, d in kinds if is_it), torch.float64 if tensor.is_floating_point() else torch.int64
    )
    return DeferredNumber(tensor.detach().reshape(()).to(dtype, copy=True))


def _short_lists(own: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    """Return a `tolist` of traced tensors that raises a `CaptureError` for a list of more than `MANY` deferred
    numbers, because each of them is an operation of the graph."""

    @functools.wraps(own)
    def call(tensor: torch.Tensor) -> Any:
        if tensor.numel() > MANY and is_deferred(tensor.flatten()[0].item()):
            raise CaptureError(
                f"{user_line()}: this line makes a list of the {tensor.numel():,} values of a tensor. Tensors have no "
                f"values while the step is captured, and Piper makes such lists of at most {MANY:,} values. Compute "
                "with the tensor itself, or call tolist() in a hook [PIPER-C001]"
            )
        return own(tensor)

    return call


def _listed(tensor: torch.Tensor) -> Any:
    return deferred(tensor) if tensor.ndim == 0 else [_listed(x) for x in tensor.unbind()]


class DeferredNumber(Proxy):
    """A placeholder for a Python number whose value is in a tensor.

    Attributes:
        tensor: a tensor without dimensions, in float64, int64, bool or complex128.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    # `isinstance` sees the number's own class.
    __class__ = property(lambda self: _CLASSES[self.tensor.dtype])

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return call_with_deferred(function, args, kwargs or {})

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal()

    def _refuse_decision(self, *args: Any) -> NoReturn:
        raise refusal(decides=True)

    def __str__(self) -> str:
        return text_of_value()

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return text_of_value()

    def __sizeof__(self) -> int:
        self._refuse()

    def __round__(self, digits: int | None = None) -> DeferredNumber:
        if is_deferred(digits):
            self._refuse()
        if not self.tensor.is_floating_point():
            return DeferredNumber(_rounded_integer(self.tensor.to(torch.int64), -(digits or 0)))
        if digits is None:
            return DeferredNumber(self.tensor.round().to(torch.int64))
        if abs(digits) > 308:  # 10 ** 309 is infinite in float64
            return self if digits > 0 else DeferredNumber(torch.zeros_like(self.tensor))
        return DeferredNumber(torch.round(self.tensor, decimals=digits))

    def converted(self, kind: type) -> DeferredNumber:
        """Return the result of `float` or `int` (`kind`) on this number."""
        whole = self.tensor.trunc() if kind is int and self.tensor.is_floating_point() else self.tensor
        return DeferredNumber(whole.to(torch.int64 if kind is int else torch.float64))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __bool__ = __index__ = __hash__ = _refuse_decision
    __int__ = __float__ = __complex__ = __iter__ = _refuse


def is_deferred(value: Any) -> bool:
    return type(value) is DeferredNumber


def refusal(error: BaseException | None = None, decides: bool = False) -> CaptureError:
    """Return the error for code that needs a value during the trace.

    Args:
        error: torch's error, if torch raised one.
        decides: whether the value decides which code runs, how often, or which item the code takes.
    """
    use, fix = (
        (
            " (for an if, a comparison, an index, a size or a number of iterations)",
            "Use torch.where, a mask, clamp or index_select instead",
        )
        if decides
        else (
            " as a Python number (such as a size or an argument of a function)",
            "Compute with tensors and functions of torch, with sizes that do not depend on values",
        )
    )
    return CaptureError(
        f"{user_line(error)}: this line needs the value of a tensor{use}. Tensors have no values while the step is "
        f"captured. {fix}, or move it to a hook [PIPER-C001]"
    )


def text_of_value() -> str:
    """Return `LATER`, the text of a value that is not known yet, to code that only shows this text.

    Raises:
        CaptureError: the code may do something else with the text.
    """
    if is_only_shown():
        return LATER
    raise CaptureError(
        f"{user_line()}: this line makes a text of the value of a tensor (str(), an f-string), but tensors have no "
        "values while the step is captured. To see the value, log it with self.log. To do something else with the "
        "text, make it in a hook, such as on_train_batch_end [PIPER-C001]"
    )


def holds_deferred(value: Any) -> bool:
    """Return whether the value is a deferred number, or a dict, list or tuple that contains one."""
    if isinstance(value, dict):
        return any(map(holds_deferred, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_deferred, value))
    return is_deferred(value)


def call_with_deferred(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function, with a tensor in place of each deferred number. The result has the dtype and the
    shape that it would have with Python numbers."""
    leaves, tree = _torch.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    # A Python number does not influence the dtype, but a tensor without dimensions would. So the only other
    # argument gets one dimension, if it is a tensor without dimensions.
    single = bool(tensors) and all(x.ndim == 0 for x in tensors) and len(leaves) == 2

    def known(x: Any) -> Any:
        if is_deferred(x):
            x = x.tensor.to(_dtype_beside(x.tensor, tensors))
            return x.to(tensors[0].device) if tensors else x
        return x.reshape(1) if single and isinstance(x, torch.Tensor) else x

    args, kwargs = _torch.tree_unflatten([known(x) for x in leaves], tree)
    result = function(*args, **kwargs)
    return result.reshape(()) if single and isinstance(result, torch.Tensor) and result.ndim else result


def _dtype_beside(number: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the dtype of a deferred number in an operation with `tensors`. A float gets the default dtype if no
    tensor has a floating-point or complex dtype, because torch gives the result this dtype. Any other number keeps
    its dtype."""
    inexact = any(x.is_floating_point() or x.is_complex() for x in tensors)
    return number.dtype if inexact or not number.is_floating_point() else torch.get_default_dtype()


def _filled(
    size: Any, value: DeferredNumber, dtype: torch.dtype | None = None, device: Any = None, **more: Any
) -> torch.Tensor:
    """Return the result of `torch.full` with a deferred value."""
    return _made(value, dtype, device).expand(size).clone().requires_grad_(more.get("requires_grad", False))


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise refusal()


def _made(
    data: Any, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
) -> torch.Tensor:
    """Return the result of `torch.tensor` for a number or nested lists of numbers. Some of the numbers are
    placeholders."""

    def stacked(data: Any) -> Any:
        if isinstance(data, list | tuple):
            parts = [stacked(x) for x in data]
            common = functools.reduce(torch.promote_types, (x.dtype for x in parts))
            return torch.stack([x.to(common) for x in parts])
        if is_deferred(data) or type(data) is NumberProxy:
            return _tensor_of(data)
        return torch.as_tensor(data, dtype=torch.float64 if type(data) is float else None)

    found: torch.Tensor = stacked(data)
    inexact = torch.get_default_dtype() if found.is_floating_point() else found.dtype
    # a copy, because the step may write into the result
    return found.to(device, dtype or inexact, copy=True).requires_grad_(requires_grad)


# Arithmetic


def _tensor_of(value: Any) -> torch.Tensor | None:
    """Return a number as a tensor: a `DeferredNumber`, a Python number, or a `NumberProxy`. Return None for
    any other value."""
    number: Any = value
    if is_deferred(number):
        found: torch.Tensor = number.tensor
        return found
    own = number.value if type(number) is NumberProxy else value
    if not isinstance(own, bool | int | float | complex):
        return None
    dtype = next(
        d for d in (torch.bool, torch.int64, torch.float64, torch.complex128) if isinstance(own, _CLASSES[d])
    )
    return (
        number.inputs.tensor(number, dtype)
        if type(number) is NumberProxy
        else torch.full((), number, dtype=dtype)
    )


def _apply(function: Callable[..., torch.Tensor], *values: Any, exact: bool = True) -> Any:
    """Return the deferred number that `function` computes from numbers, as tensors of a common dtype: at least
    int64 if `exact`, otherwise at least float64. Return NotImplemented if a value is not a number."""
    tensors = [_tensor_of(x) for x in values]
    if any(x is None for x in tensors):
        return NotImplemented
    known = [x for x in tensors if x is not None]
    dtype = functools.reduce(
        torch.promote_types, [torch.int64 if exact else torch.float64, *(x.dtype for x in known)]
    )
    # Python numbers stay numbers in the graph, so that `batch_dependence.py` can find out which of them
    # depend on the number of samples.
    first, *others = (
        x if i and type(x) in (int, float) else t.to(dtype)
        for i, (x, t) in enumerate(zip(values, known, strict=True))
    )
    return DeferredNumber(function(first, *others))


def _floor_divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _rounded_integer(x: torch.Tensor, zeros: int) -> torch.Tensor:
    """Return integers rounded to multiples of 10 ** `zeros`, halves to the even multiple, as `round` does."""
    if zeros <= 0:
        return x
    if zeros > 18:  # the multiple is out of the range of int64, or nearly so
        return torch.zeros_like(x)
    step = 10**zeros
    below = _floor_divided(x, torch.full_like(x, step))
    # The rest and the distance to the next multiple: their sum is `step`.
    rest = x - below * step
    up = (rest > step - rest) | ((rest == step - rest) & (below % 2 == 1))
    found: torch.Tensor = (below + up) * step
    return found


def _logarithm(x: torch.Tensor, base: Any = None) -> torch.Tensor:
    """Return the logarithm of x to a base, which is a tensor or a number (None: e)."""
    natural = torch.log(x)
    if base is None:
        return natural
    return natural / (torch.log(base) if isinstance(base, torch.Tensor) else math.log(base))


# operator -> (torch's function, whether integers give integers)
_BINARY: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "add": (torch.add, True),
    "sub": (torch.sub, True),
    "mul": (torch.mul, True),
    "truediv": (torch.div, False),
    "floordiv": (_floor_divided, True),
    "mod": (torch.remainder, True),
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# operator -> torch's function
_UNARY: dict[str, Callable[..., torch.Tensor]] = {"neg": torch.neg, "pos": torch.clone, "abs": torch.abs}
_ROUNDING = {"trunc": torch.trunc, "floor": torch.floor, "ceil": torch.ceil}
_SAME = ("sqrt", "exp", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh", "atan", "erf")
# function of `math` -> torch's function
_MATH = {name: getattr(torch, name) for name in _SAME}
_MATH |= {
    "log": _logarithm,
    "fabs": torch.abs,
    "pow": torch.pow,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
}


def _binary(
    function: Callable[..., torch.Tensor], exact: bool, swapped: bool
) -> Callable[[DeferredNumber, Any], Any]:
    def call(self: DeferredNumber, other: Any) -> Any:
        return _apply(function, *((other, self) if swapped else (self, other)), exact=exact)

    return call


def _power(base: Any, exponent: Any) -> Any:
    """Return `base ** exponent`. At least one of the two is deferred. Integers give an integer, or for a negative
    exponent a float.

    Raises:
        CaptureError: both are integers and the exponent is deferred, so its sign is unknown.
    """
    whole = all(isinstance(x, int) for x in (base, exponent))
    if whole and type(exponent) is DeferredNumber:
        raise refusal()
    return _apply(torch.pow, base, exponent, exact=whole and exponent >= 0)


def _unary(function: Callable[..., torch.Tensor], integer: bool) -> Callable[[DeferredNumber], Any]:
    def call(self: DeferredNumber) -> Any:
        found = _apply(function, self)
        return DeferredNumber(found.tensor.to(torch.int64)) if integer else found

    return call


for _name, (_function, _exact) in _BINARY.items():
    setattr(DeferredNumber, f"__{_name}__", _binary(_function, _exact, swapped=False))
    setattr(DeferredNumber, f"__r{_name}__", _binary(_function, _exact, swapped=True))
setattr(DeferredNumber, "__pow__", _power)  # noqa: B010
setattr(DeferredNumber, "__rpow__", lambda self, other: _power(other, self))  # noqa: B010
for _name in _COMPARISONS:
    setattr(DeferredNumber, f"__{_name}__", _binary(getattr(torch, _name), True, swapped=False))
for _name, _operation in _UNARY.items():
    setattr(DeferredNumber, f"__{_name}__", _unary(_operation, integer=False))
for _name, _operation in _ROUNDING.items():
    setattr(DeferredNumber, f"__{_name}__", _unary(_operation, integer=True))


# Functions of Python that need values


class _TensorAwareType(type):
    """A metaclass of replacements for `float` and `int` in the user's code.

    The replacements also accept deferred numbers and tensors without values.
    """

    own: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the converted value: a deferred number for a deferred number or a tensor without values, and
        otherwise Python's result."""
        value: Any = args[0] if len(args) == 1 and not kwargs else None
        if is_deferred(value):
            return value.converted(cls.own)
        try:
            return cls.own(*args, **kwargs)
        except _torch.WITHOUT_VALUES:
            if not isinstance(value, torch.Tensor):
                raise
            return deferred(value).converted(cls.own)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.own)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.own)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.own

    def __hash__(cls) -> int:
        return hash(cls.own)


class _ClassAwareType(_TensorAwareType):
    """A metaclass of the replacement for `type` in the user's code, which sees through proxies."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the class of a value (`class_of`), or a new class."""
        return class_of(args[0]) if len(args) == 1 and not kwargs else cls.own(*args, **kwargs)

    def __getitem__(cls, parameters: Any) -> Any:
        return types.GenericAlias(cls.own, parameters)


def _extreme(own: Callable[..., Any], better: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a `max` or `min` that accepts deferred numbers in a call without keyword arguments. Among equal
    values, it chooses the first one, as Python does."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if kwargs or not any(map(is_deferred, values)):
            return own(values, **kwargs) if len(args) == 1 else own(*args, **kwargs)
        return functools.reduce(lambda best, x: _chosen(better(x, best), x, best), values)

    return call


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    if not is_deferred(condition):
        return one if condition else other
    return _apply(lambda x, y: torch.where(condition.tensor, x, y), one, other)


def _stand_in(own: type) -> Any:
    return _TensorAwareType(own.__name__, (own,), {"own": own})


# builtin function -> its replacement, which accepts deferred numbers
NAMES: dict[str, Any] = {
    "float": _stand_in(builtins.float),
    "int": _stand_in(builtins.int),
    "max": _extreme(builtins.max, operator.gt),
    "min": _extreme(builtins.min, operator.lt),
    "type": _ClassAwareType("type", (type,), {"own": type}),
}


@contextlib.contextmanager
def accepting_deferred(namespaces: Iterable[Namespace]) -> Iterator[None]:
    """Within this context, `float`, `int`, `max`, `min`, `torch.full` and common functions of `math` accept
    deferred numbers, and `type` returns the class of a proxy's object.

    Functions that take sizes, such as `torch.zeros`, raise a `CaptureError` for a deferred size. Records of
    `logging` show deferred numbers and tensors as `LATER`.

    Args:
        namespaces: pairs of a globals dict of the step's code and the global names that this code calls. The
            context adds replacements of the builtins to these dicts, unless the user's code defines the name.
    """
    put = [
        (names, name) for names, called in namespaces for name in called & NAMES.keys() if name not in names
    ]
    with contextlib.ExitStack() as stack:
        for name, function in _MATH.items():
            computed = functools.partial(_apply, function, exact=False)
            stack.enter_context(replaced_attribute(math, name, _or_deferred(getattr(math, name), computed)))
        message = _with_phrase(logging.LogRecord.getMessage)
        stack.enter_context(replaced_attribute(logging.LogRecord, "getMessage", message))
        stack.enter_context(replaced_attribute(torch, "full", _or_deferred(torch.full, _filled)))
        # The classes of traced tensors have their own `tolist`, which calls `item` for each element.
        for kind in _torch.TRACED:
            stack.enter_context(replaced_attribute(kind, "tolist", _short_lists(kind.tolist)))
        for owner, name in _SIZED:
            stack.enter_context(replaced_attribute(owner, name, _or_deferred(getattr(owner, name), _refused)))
        for names, name in put:
            names[name] = NAMES[name]
        try:
            yield
        finally:
            for names, name in put:
                names.pop(name, None)


def _with_phrase(own: Callable[[logging.LogRecord], str]) -> Callable[[logging.LogRecord], str]:
    """Return `LogRecord.getMessage` for records with values that are not known. Texts such as `%.3f` need numbers,
    so they become `%s`, which shows `LATER`."""

    @functools.wraps(own)
    def message(record: logging.LogRecord) -> str:
        values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        if any(is_deferred(x) or (isinstance(x, torch.Tensor) and _torch.is_traced(x)) for x in values):
            record = copy.copy(record)
            record.msg = _CONVERSION.sub(
                lambda found: "%%" if found[0] == "%%" else f"%{found[1] or ''}s", str(record.msg)
            )
        return own(record)

    return message


def _or_deferred(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `other` if a positional argument is a deferred number, and otherwise
    `own`."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return other(*args, **kwargs) if any(map(is_deferred, args)) else own(*args, **kwargs)

    return call
