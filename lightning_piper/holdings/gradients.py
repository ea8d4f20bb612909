"""Gradients that are on other processes: reading one is an error here, and it is not None.

Code in hooks walks over `module.parameters()` and leaves out those whose gradient is None, as if nothing had used them. A parameter
of another process, or one that is sharded, has a gradient, but not here. So it gets a stand-in, whose error says so when its values
are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.ownership import Ownership

_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # of a tensor's attributes, those that are tensors
_ALLOWED = ("size", "dim", "numel", "is_floating_point", "requires_grad_", "detach_", "zero_")


class Elsewhere(torch.Tensor):
    """A gradient without values, of a parameter without values. It has a shape and a dtype, and an error for everything else."""

    of_parameter: str
    zeroed = False

    @staticmethod
    def of(param: torch.Tensor, name: str) -> Elsewhere:
        found = torch.empty_like(param, requires_grad=False).as_subclass(Elsewhere)
        found.of_parameter = name
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ in _ALLOWED or (func.__name__ == "__get__" and attribute not in _VALUES):
            if func.__name__ == "zero_":
                args[0].zeroed = True
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


def absent(ownership: Ownership, compiled: Compiled) -> dict[str, torch.nn.Parameter]:
    """The module's parameters that get gradients, but not whole in this process."""
    used: set[str] = set().union(*(compiled.params_on(device) for device in compiled.plans))
    return {name: x for name, x in ownership.params.items() if x.is_meta and x.requires_grad and name in used}


def mark(params: Mapping[str, torch.nn.Parameter], local_shards: Mapping[str, torch.Tensor]) -> None:
    """Give these parameters gradients that are elsewhere, before the next ones come.

    Args:
        local_shards: of some, with gradients of their own. Where the parameter's was zeroed (`module.zero_grad()`), so is theirs.
    """
    for name, param in params.items():
        if isinstance(param.grad, Elsewhere) and not param.grad.zeroed:
            continue
        param.grad = Elsewhere.of(param, name)
        if name in local_shards:
            local_shards[name].grad = None
