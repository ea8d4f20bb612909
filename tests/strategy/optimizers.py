"""Optimizers that look at more than one element at a time."""

from __future__ import annotations

from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by the ratio of the norms of parameter and step (You et al., 2020), without momentum."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm().clamp_min(1e-6) * p.norm(), alpha=group["lr"])
        return loss


class Optional(torch.optim.Optimizer):
    """SGD, or normalised steps where a setting beside the defaults says so."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.normalised = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() if self.normalised else 1.0), alpha=group["lr"])


class Argued(torch.optim.SGD):
    """Cannot be made from its defaults."""

    def __init__(self, params: Any, schedule: Any) -> None:
        super().__init__(params, lr=0.1)
        self.schedule = schedule


class Clipping(torch.optim.Optimizer):
    """SGD with steps of bounded length, which is measured over all parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        for p in params:
            p.sub_(p.grad, alpha=self.defaults["lr"])
        return loss


class Noisy(torch.optim.SGD):
    """Adds random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))
        return loss
