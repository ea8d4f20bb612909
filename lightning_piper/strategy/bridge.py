"""From the plan's gradients to autograd: a loss whose `backward` hands them out.

Lightning zeroes gradients after the training step and calls `backward` on what the step returned. So the step's gradients wait
here until then, and everything around `backward` (accumulation, loss scaling, hooks, users' overrides) works as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_piper.errors import ExecutionError


class Bridge:
    """Makes losses of which `backward` fills the `.grad` of given parameters.

    Args:
        params: by name; those that the plan updates.
        device: of the losses.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
        trained = {name: x for name, x in params.items() if x.requires_grad}
        self._names, self._params = tuple(trained), tuple(trained.values())
        # Gives the loss a gradient function also where a process has no parameters at all.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def loss(self, value: torch.Tensor, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A loss of this value whose derivatives are `grads`, which belong to it from now on."""
        waiting = _Waiting(value, [grads.get(name) for name in self._names])
        result: torch.Tensor = _HandOut.apply(waiting, self._anchor, *self._params)
        return result


class _Waiting:
    def __init__(self, value: torch.Tensor, grads: list[torch.Tensor | None]) -> None:
        self.value = value
        self._grads: list[torch.Tensor | None] | None = grads

    def take(self) -> list[torch.Tensor | None]:
        if self._grads is None:
            raise ExecutionError("backward ran twice on the loss of one training step; its gradients are handed out only once")
        grads, self._grads = self._grads, None
        return grads


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, anchor: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.waiting = waiting
        return waiting.value

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = incoming
        grads = ctx.waiting.take()
        # Looking at a value on a GPU would make the host wait for it; multiplying by one does not.
        if factor.device.type != "cpu" or factor.item() != 1.0:
            for grad in grads:
                if grad is not None:
                    grad.mul_(factor.to(grad.dtype))
        return (None, None, *grads)
