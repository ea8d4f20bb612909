"""`Elsewhere`: a gradient that is on other processes, or here in pieces: reading it is an error here, and it is not None.

Code in hooks walks over `module.parameters()` and leaves out those whose gradient is None, as if nothing had used them. A parameter
of another process, or one that is sharded, has a gradient, but not here. So it gets a stand-in, whose error says so when its values
are read.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_piper.errors import PiperError

_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # of a tensor's attributes, those that are tensors
_ALLOWED = ("size", "dim", "numel", "is_floating_point", "requires_grad_", "detach_", "zero_")


class Elsewhere(torch.Tensor):
    """A gradient without values, of a parameter without values. It has a shape and a dtype, and an error for everything else.

    Attributes:
        of_parameter: name.
        shard: of the parameter, if this process has one; `shard.grad` becomes zero with this.
    """

    of_parameter: str
    shard: torch.Tensor | None = None

    @staticmethod
    def of(param: torch.Tensor, name: str, shard: torch.Tensor | None = None) -> Elsewhere:
        found = torch.empty_like(param, requires_grad=False).as_subclass(Elsewhere)
        found.of_parameter, found.shard = name, shard
        return found

    def drop(self) -> None:
        """The parameter's gradient becomes None."""
        if self.shard is not None:
            self.shard.grad = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ in _ALLOWED or (func.__name__ == "__get__" and attribute not in _VALUES):
            if func.__name__ == "zero_" and args[0].shard is not None and args[0].shard.grad is not None:
                args[0].shard.grad.zero_()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise PiperError(
            f"PiperStrategy: {_name(args)}the gradient is not whole in this process, for the parameter is another stage's, or in "
            "pieces. For norms use lightning_piper.grad_norm(module, norm_type), for clipping Trainer(gradient_clip_val=...); "
            "trainer.optimizers have the parameters and pieces of this process, with their gradients"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {self.of_parameter!r}, not whole in this process>"


def _name(args: Any) -> str:
    """Of the first parameter among arguments of an operation."""
    for x in args:
        if isinstance(x, Elsewhere):
            return f"parameter {x.of_parameter!r}: "
        if isinstance(x, list | tuple) and (found := _name(x)):
            return found
    return ""
