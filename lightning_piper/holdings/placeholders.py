"""Placeholders in the module, on the meta device. They replace tensors that are sharded or whose values are
on other processes.

Some of torch's in-place operations accept tensors on the meta device without an error:
`average.mul_(0.9).add_(parameter)` ignores such a parameter and returns a wrong average. So an operation that
combines real values with a placeholder, or with a result computed from one, raises an error. A write into a
placeholder is ignored, because the process that has the values executes the same write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_piper.common.user_lines import user_frame
from lightning_piper.errors import PiperError
from lightning_piper.holdings.remote_gradient import RemoteGradient, first_by_position

# The advice of errors about placeholders, by the kind of the access.
INSIDE = (
    "Do this inside of `with piper.whole_module(module)`, which all processes must enter, and get the tensor from "
    "the module there"
)
AVERAGE = f"{INSIDE}. (Lightning's EMAWeightAveraging averages weights without it)"
SAVED = (
    "A hook or callback has put this tensor into the checkpoint. Put a copy there that you make inside of `with "
    "piper.whole_module(module)`, which all processes must enter"
)
DEVICE = "Pass parameter.device and parameter.dtype instead of the parameter"
LOSS = "Compute the loss in training_step, with all of its terms"
EQUAL = (
    "Lightning's BaseFinetuning compares the parameters that it unfreezes with those of the optimizer. After the first "
    "batch, this needs whole parameters in each process: train replicas (PiperStrategy('ddp')), or unfreeze in epoch 0. "
    f"In other code: {INSIDE[0].lower()}{INSIDE[1:]}"
)


class Placeholder(torch.Tensor):
    """A placeholder for values that are not whole on this process.

    Attributes:
        stands_for: Name of the parameter or buffer, and the device of this process. It is a tuple, because an
            attribute that is a text or a number counts as set by the user (`optimizer_trial.kinds_of`).
    """

    stands_for: tuple[str, torch.device]

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        """Ignore real values, like other writes. The process that has the values also sets them. A
        placeholder is assigned as usual."""
        if isinstance(tensor, Placeholder):
            torch.Tensor.data.__set__(self, tensor)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        raise _refusal(self, AVERAGE, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error instead of letting `torch.save` and pickle silently write a file without the
        values."""
        raise _refusal(self, INSIDE)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the meta device. Tensors without values that it returns become placeholders.

        A write into a placeholder has no effect, but counts as a change. `device` is the device of this
        process.

        Raises:
            PiperError: The function copies a placeholder, reads its values, combines it with real values, or
                would move a real tensor to the meta device.
        """
        args, kwargs = first_by_position(args, kwargs)
        if func == _DEVICE:
            # A placeholder's `device` is this process's device, not meta, because user code creates tensors
            # on it or moves tensors to it (`x.to(p.device)`).
            return _NOTHING[1] if (of := _first(args)) is None else of.stands_for[1]
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__" or func.__name__ in _OFTEN:
                return _marked(func(*args, **kwargs), args)
            given = [*args, *kwargs.values()]
            if _writes(func.__name__):
                _check_written(given)
            if func.__name__ in _MOVES and not isinstance(given[0], Placeholder):
                raise _refusal(_first(given), DEVICE, func.__name__)
            if func.__name__ in _COPIES:
                raise _refusal(_first(given), AVERAGE, func.__name__)
            try:
                return _marked(func(*args, **kwargs), given)
            except (RuntimeError, TypeError) as error:
                if "meta" not in str(error).lower():
                    raise
                if _writes(func.__name__) and isinstance(given[0], Placeholder):
                    return given[0].zero_()  # counts as a change of the placeholder
                advice = {"backward": LOSS, "equal": EQUAL}.get(func.__name__, INSIDE)
                raise _refusal(_first(given), advice, func.__name__) from error


class ParameterPlaceholder(Placeholder, nn.Parameter):
    """A placeholder in the module for a parameter that only other processes hold, each of them whole."""

    @property
    def grad(self) -> torch.Tensor | None:
        return nn.Parameter.grad.__get__(self)  # type: ignore[union-attr, no-any-return]

    @grad.setter
    def grad(self, tensor: torch.Tensor | None) -> None:
        """Set a placeholder gradient, or None, which also drops the gradient of a local shard.

        Raises:
            PiperError: The gradient has values, or belongs to a sharded parameter.
        """
        before = self.grad
        if tensor is None and isinstance(before, RemoteGradient):
            before.drop()
        accepted = RemoteGradient if isinstance(self, ShardedPlaceholder) else RemoteGradient | Placeholder
        if tensor is not None and not isinstance(tensor, accepted):
            raise PiperError(
                f"PiperStrategy: the gradient of {_name(self)!r} cannot be replaced here, because this process does not "
                "have all of it. Replace the gradients of the parameters in trainer.optimizers[0].param_groups instead "
                "[PIPER-S007]"
            )
        nn.Parameter.grad.__set__(self, tensor)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ShardedPlaceholder(ParameterPlaceholder):
    """A placeholder in the module for a parameter whose values are in local shards.

    In-place writes to its `.data`, which has no values, count as changes of the placeholder.
    """

    @property
    def data(self) -> torch.Tensor:
        # `detach` shares the placeholder's version counter, which counts writes. `.data` would not share it.
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, Placeholder):
            raise PiperError(
                f"PiperStrategy: the values of parameter {_name(self)!r} are sharded over the processes, and "
                "cannot be replaced here (.data = ...). Change the shards of this process instead: the parameters in "
                "trainer.optimizers[0].param_groups [PIPER-S007]"
            )
        nn.Parameter.data.__set__(self, tensor)  # type: ignore[attr-defined]


_DEVICE = torch.Tensor.device.__get__
# Functions that are called often and need no checks.
_OFTEN = ("data_ptr", "numel", "size", "dim", "detach", "untyped_storage")
# Functions that raise an error: a copy would be kept and read after the run, when it is too late for an
# error.
_COPIES = ("clone", "__copy__")
# Functions of augmented assignments (`x += y`), which change their first argument in place.
_ASSIGNMENTS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)
# Functions that raise an error if they would move a real tensor to the meta device.
_MOVES = ("to", "type_as")


def stand_in(tensor: torch.Tensor, name: str, sharded: bool, device: torch.device) -> torch.Tensor:
    """Turn a tensor on the meta device into a placeholder for the parameter or buffer `name`, in a process
    that works on `device`. Returns the same tensor object with another class. `sharded` says whether the
    values of a parameter are in local shards."""
    if isinstance(tensor, nn.Parameter):
        tensor.__class__ = ShardedPlaceholder if sharded else ParameterPlaceholder
    else:
        tensor.__class__ = Placeholder
    tensor.stands_for = (name, device)  # type: ignore[attr-defined]
    return tensor


def check_values(content: Any) -> None:
    """Check that nested dicts, lists and tuples contain no placeholders, because their content is about to be
    saved.

    Raises:
        PiperError: They contain a placeholder.
    """
    parts = [content]
    for part in parts:  # the loop reaches the parts that it appends
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, Placeholder):
            raise _refusal(part, SAVED)


def _writes(name: str) -> bool:
    """Return whether the function of this name changes its first argument in place."""
    return (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNMENTS


def _check_written(args: Any) -> None:
    """Raise an error if a function would write values that are not on this process into a tensor with values.

    `args` are the arguments of the function. It writes into the first one: a tensor or a list of tensors.
    """
    target, others = args[0], args[1:]
    if isinstance(target, torch.Tensor):
        if not target.is_meta and (found := _first(others)) is not None:
            raise _refusal(found, AVERAGE)
        return
    for other in others:  # lists of tensors, as in `torch._foreach_add_`
        if isinstance(other, list | tuple):
            for x, y in zip(target, other, strict=False):
                _check_written((x, y))


def _first(args: Any) -> Placeholder | None:
    """Return the first placeholder among arguments and in their lists and tuples; None if there is none."""
    for x in args:
        found = x if isinstance(x, Placeholder) else _first(x) if isinstance(x, list | tuple) else None
        if found is not None:
            return found
    return None


def _marked(found: Any, args: Any) -> Any:
    """Return the result of an operation on placeholders, with tensors on the meta device turned into
    placeholders. Such a tensor may be the result itself, or lie in a list or tuple. All other results are
    returned unchanged."""
    if type(found) is torch.Tensor and found.is_meta:
        made = found.as_subclass(Placeholder)
        of = _first(args)
        made.stands_for = _NOTHING if of is None else of.stands_for
        return made
    if type(found) in (list, tuple) and any(isinstance(x, torch.Tensor) for x in found):
        return type(found)(_marked(x, args) for x in found)
    return found


_NOTHING = ("", torch.device("cpu"))


def _name(placeholder: Placeholder | None) -> str:
    return getattr(placeholder, "stands_for", _NOTHING)[0]


def _refusal(placeholder: Placeholder | None, advice: str, operation: str = "") -> PiperError:
    """Return the error for a read of a placeholder's values."""
    line = user_frame()
    where = " at ".join(filter(None, (operation, line)))
    return PiperError(
        f"PiperStrategy: {where}{': ' * bool(where)}the values of {_name(placeholder)!r} cannot be read or copied "
        f"here, because this process does not have all of them. {advice} [PIPER-S007]"
    )
