"""Tensors whose shape depends on values (`logits[mask]`): a step may pass them to metric objects, and return
them.

A graph cannot contain such a tensor. The capture records the functions that the step applies to it. Piper
applies these functions after the step has run, to tensors of the whole batch. Every other use (in the loss, a
log, a number) raises an error that names the line of the selection.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_piper.accelerators.kinds import MOVES
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

# Torch's functions that select elements, so that the shape of the result may depend on values.
SELECTING = frozenset(
    {
        torch.Tensor.__getitem__,
        torch.masked_select,
        torch.Tensor.masked_select,
        torch.nonzero,
        torch.Tensor.nonzero,
        torch.unique,
        torch.Tensor.unique,
    }
)
_INDEX = "an index with the value of a tensor"  # name of a selection by such an index in messages
_INDEX_REMEDY = "Call index_select with the tensor instead: x.index_select(0, index.reshape(1))"
# Names of functions that may be applied to a `DataDependentTensor`: they return one tensor, change no
# argument and draw no random numbers.
_FOLLOWED = frozenset({
    "__getitem__", "masked_select", "nonzero", "argmax", "argmin", "argsort", "softmax", "log_softmax",
    "sigmoid", "logsigmoid",
    "relu", "tanh", "exp", "log", "sqrt", "abs", "neg", "detach", "clone", "contiguous", "cpu", "to", "type",
    "type_as",
    "float", "double", "half", "bfloat16", "long", "int", "short", "bool", "round", "floor", "ceil", "clamp",
    "sum", "mean",
    "amax", "amin", "norm", "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose",
    "t", "cat", "concat",
    "stack", "one_hot", "logical_not", "logical_and", "logical_or", "isnan", "isfinite", "eq", "ne", "lt",
    "le", "gt", "ge",
    "add", "sub", "mul", "div", "pow", "where", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__add__",
    "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__neg__", "__abs__",
    "__and__", "__or__", "__invert__", *MOVES,
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class FunctionResult:
    """The entry of a spec for a value that a function returns. `BatchSpec.rebuild` calls the function.

    Attributes:
        args, kwargs: the batch spec's entries for the arguments of the call.
    """

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class PerSampleList:
    """A list with one entry for each sample, which a function makes from tensors after the step.

    Attributes:
        function: makes the list from the tensors.
        tensors: tensors with the samples in their first dimension.
    """

    function: Callable[..., Any]
    tensors: list[torch.Tensor]


class DataDependentTensor:
    """A tensor whose shape depends on values, during a trace.

    Attributes:
        function, args, kwargs: the call that returns it.
        where: the line of the user's code that selected elements.
        remedy: The last sentences of the error for a use of the tensor.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    remedy: str

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], where: str
    ) -> None:
        leaves, tree = _torch.tree_flatten((args, kwargs))
        # Clone the tensors, because the step may write into them later.
        args, kwargs = _torch.tree_unflatten(
            [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves], tree
        )
        self.__dict__.update(function=function, args=args, kwargs=kwargs, where=where, remedy=_remedy())

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> DataDependentTensor:
        found: DataDependentTensor = next(x for x in _torch.tree_flatten((args, kwargs))[0] if type(x) is cls)
        if getattr(function, "__name__", "") not in _FOLLOWED or {"out", "inplace"} & (kwargs or {}).keys():
            found.refuse()
        return cls(function, args, kwargs or {}, found.where)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse_to(user_line())

    def refuse_to(self, needs: str) -> NoReturn:
        """Raise the error for a use of this tensor that a capture does not support.

        Args:
            needs: The user of the tensor: a line of the user's code, or the loss.
        """
        cause = self._cause
        raise CaptureError(
            f"{self.where}: the result of {cause} depends on tensor values. They are only known when the step "
            f"runs, but {needs} uses the result. {_INDEX_REMEDY if cause == _INDEX else self.remedy} [PIPER-C002]"
        )

    @property
    def _cause(self) -> str:
        """The operation that selects by values, as messages name it."""
        first: DataDependentTensor = self
        while inner := [
            x for x in _torch.tree_flatten((first.args, first.kwargs))[0] if type(x) is type(self)
        ]:
            first = inner[0]
        if first.function is torch.Tensor.__getitem__:
            index, _ = _torch.tree_flatten(first.args[1:])
            masks = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in index)
            return "a boolean mask" if masks else _INDEX
        return f"torch.{first.function.__name__}"

    def __getattr__(self, name: str) -> Any:
        if name not in _FOLLOWED:
            if name.startswith("__"):
                raise AttributeError(name)
            self.refuse()
        return lambda *args, **kwargs: DataDependentTensor.__torch_function__(
            getattr(torch.Tensor, name), (), (self, *args), kwargs
        )

    __iter__ = __len__ = __contains__ = __setitem__ = __setattr__ = __array__ = __index__ = __int__ = (
        __float__
    ) = __bool__ = refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __hash__ = __str__ = __format__ = refuse


def _remedy() -> str:
    """Return what to do if a capture does not support the running selection of elements."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        # `transformers` gives this attribute to experts whose implementation can be chosen.
        if isinstance(caller, nn.Module) and hasattr(caller, "has_post_expert_norm"):
            return (
                "transformers selects the tokens of each expert by values. Call "
                "model.set_experts_implementation('batched_mm'), or use_piper_experts(model) of "
                "lightning_piper.huggingface"
            )
        frame = frame.f_back
    return (
        "Use torch.where, a product with a mask or index_add instead, or move the computation to a hook. Passing the result "
        "to a metric object is fine"
    )


def _operator(name: str) -> Callable[..., DataDependentTensor]:
    return lambda self, *args: DataDependentTensor.__torch_function__(
        getattr(torch.Tensor, name), (), (self, *args)
    )


for _name in _FOLLOWED:
    if _name.startswith("__"):
        setattr(DataDependentTensor, _name, _operator(_name))
