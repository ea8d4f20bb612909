"""`RemoteGradient`: a gradient that is on other processes, or sharded. It is not None, and reading it is an
error.

Code in hooks iterates over `module.parameters()` and skips parameters without a gradient, as if nothing had
used them. A parameter that is sharded or on another process has a gradient, but not in this process. So its
`grad` is a placeholder, which raises an error when code reads its values. Elementwise operations
with numbers (scaling, clamping, replacing non-finite values) need only local elements. The placeholder
applies them to this process's shard, and each other process does the same with its shard.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_piper.errors import PiperError

_VALUES = ("T", "mT", "H", "mH", "real", "imag")  # attributes of a tensor that are tensors with its values
# Functions that do not read values.
_ALLOWED = ("size", "dim", "numel", "is_floating_point", "requires_grad_", "detach_")
# Functions that change elements by numbers, and so can change the local shard's gradient.
_ELEMENTWISE = (
    "zero_", "neg_", "nan_to_num_", "mul_", "multiply_", "__imul__", "div_", "divide_", "true_divide_",
    "__itruediv__", "clamp_",
    "clip_", "clamp_min_", "clamp_max_", "_foreach_zero_", "_foreach_neg_", "_foreach_mul_", "_foreach_div_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
)  # fmt: skip


class RemoteGradient(torch.Tensor):
    """A gradient without values, of a parameter without values. It has a shape and a dtype.

    Reading its values raises an error. Elementwise changes by numbers go to `shard.grad`.

    Attributes:
        of_parameter: Name of the parameter.
        shard: This process's local shard of the parameter; None if it has no shard.
    """

    of_parameter: str
    shard: torch.Tensor | None = None

    @staticmethod
    def of(param: torch.Tensor, name: str, shard: torch.Tensor | None = None) -> RemoteGradient:
        found = torch.empty_like(param, requires_grad=False).as_subclass(RemoteGradient)
        found.of_parameter, found.shard = name, shard
        return found

    def drop(self) -> None:
        """Drop the gradient of the local shard. Called when the parameter's gradient becomes None."""
        if self.shard is not None:
            self.shard.grad = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function that needs no values, or apply an elementwise change to the local gradients.

        An elementwise change by numbers, such as `grad.mul_(2)` or `torch.mul(grad, 2, out=grad)`, applies to
        the gradient of the local shard, if this process has one. It returns its first argument. A function on
        lists (`torch._foreach_mul_`) returns the function's result. `detach` and `.data` return the
        placeholder itself.

        Raises:
            PiperError: The function needs values, or the gradient of the local shard does not exist yet.
        """
        args, kwargs = first_by_position(args, kwargs)
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ == "detach" or (func.__name__ == "__get__" and attribute == "data"):
            return args[0]
        if func.__name__ in _ALLOWED or (func.__name__ == "__get__" and attribute not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        in_place = func.__name__ + "_" if args and kwargs.get("out") is args[0] else func.__name__
        rest = {name: x for name, x in kwargs.items() if name != "out"}
        if args and in_place in _ELEMENTWISE and all(_is_number(x) for x in [*args[1:], *rest.values()]):
            pieces = [
                x
                for x in map(_here, args[0] if isinstance(args[0], list | tuple) else [args[0]])
                if x is not None
            ]
            if in_place.startswith("_foreach"):
                return func(pieces, *args[1:], **rest) if pieces else None
            for piece in pieces:
                getattr(piece, in_place)(*args[1:], **rest)
            return args[0]
        raise PiperError(
            f"PiperStrategy: {_name([*args, *kwargs.values()])}this process does not have the whole gradient. "
            "For norms, use lightning_piper.grad_norm(module, norm_type). For clipping, use "
            "Trainer(gradient_clip_val=...). For other work, read the gradients of the parameters in "
            "trainer.optimizers[0].param_groups, which this process has [PIPER-S007]"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {self.of_parameter!r}, not available in this process>"


def first_by_position(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a torch function, with its first argument by position.

    Torch names the first argument `input` (`torch.mul(input=x, other=2)`), or `self` if the function takes
    lists.
    """
    kwargs = dict(kwargs or {})
    first = next((name for name in ("input", "self") if name in kwargs), None)
    return (tuple(args), kwargs) if args or first is None else ((kwargs.pop(first),), kwargs)


def _here(grad: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that an elementwise change of a gradient changes: the gradient of the local shard, or
    `grad` itself if it is not a placeholder. None if this process has no shard.

    Raises:
        PiperError: The local shard does not have a gradient yet.
    """
    if not isinstance(grad, RemoteGradient):
        return grad
    if grad.shard is not None and grad.shard.grad is None:
        raise PiperError(
            f"PiperStrategy: the gradient of {grad.of_parameter!r} cannot be changed in the middle of a "
            "gradient accumulation, because it is summed over replicas only with the last batch. Change it "
            "in on_before_optimizer_step or configure_gradient_clipping [PIPER-S007]"
        )
    return None if grad.shard is None else grad.shard.grad


def _is_number(x: Any) -> bool:
    """Return whether an operand is one value for all elements. A list, and a tensor with dimensions or
    without values, are not."""
    return not isinstance(x, list | tuple) and not (
        isinstance(x, torch.Tensor) and (x.dim() > 0 or x.is_meta)
    )


def _name(args: Any) -> str:
    """Return "parameter NAME: " for the first placeholder among an operation's arguments, or an empty
    text."""
    for x in args:
        if isinstance(x, RemoteGradient):
            return f"parameter {x.of_parameter!r}: "
        if isinstance(x, list | tuple) and (found := _name(x)):
            return found
    return ""
