"""Optimizers that look at more than one element at a time."""

from __future__ import annotations

from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by the ratio of the norms of parameter and step (You et al., 2020),
    without momentum.
    """

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
    """SGD, or normalized steps where a setting beside the defaults says so."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.normalized = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() if self.normalized else 1.0), alpha=group["lr"])


class Sharp(torch.optim.Optimizer):
    """SGD with the gradient of where the steepest way up leads (Foret et al., 2021): runs the closure
    twice.
    """

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        (group,) = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        moves = [p.grad * (group["rho"] / norm) for p in params]
        torch._foreach_add_(params, moves)
        closure()
        torch._foreach_sub_(params, moves)
        for p in params:
            p.sub_(p.grad, alpha=group["lr"])
        return loss


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


class Ruled(torch.optim.Optimizer):
    """SGD by a rule of its own: `change` gives a parameter's step from the gradient. Counts in
    `state["step"]`.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.sub_(self.change(p, p.grad, state), alpha=group["lr"])
        return loss

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad


class Centralised(Ruled):
    """Gradients of convolutions have a mean of zero in each channel (Yong et al., 2020)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad - grad.mean(tuple(range(1, grad.ndim)), keepdim=True) if grad.ndim > 2 else grad


class Projected(Ruled):
    """Steps at right angles to a weight, where the gradient nearly is (SGDP; Heo et al., 2021)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if p.ndim < 2:
            return grad
        for view in (p.flatten(1), p.reshape(1, -1)):
            along = torch.nn.functional.cosine_similarity(view, grad.reshape(view.shape), dim=1).abs()
            if along.max() < 0.1 / view.shape[1] ** 0.5:
                unit = view / view.norm(dim=1, keepdim=True)
                momentum = state.get("momentum", torch.ones_like(p)) + grad
                return (
                    momentum.reshape(view.shape) - (unit * momentum.reshape(view.shape)).sum(1, True) * unit
                ).view_as(p)
        return grad


class InBlocks(Ruled):
    """Keeps the momentum of many elements in eight bits, with a scale for each block (Dettmers et al.,
    2022).
    """

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        momentum = 0.9 * state.get("momentum", torch.zeros_like(p)) + grad
        state["momentum"] = momentum
        if p.numel() >= 4096:
            blocks = torch.nn.functional.pad(momentum.flatten(), (0, -p.numel() % 256)).view(-1, 256)
            scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
            kept = (blocks / scale * 127).round() / 127 * scale
            state["momentum"] = kept.flatten()[: p.numel()].view_as(p)
        return momentum


class Bounded(Ruled):
    """No step is longer than a million."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad * (1e5 / grad.norm()).clamp_max(1.0)


class Lifted(Ruled):
    """No step is shorter than a hundredth."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad * (0.01 / grad.norm()).clamp_min(1.0)


class Lars(Ruled):
    """Matrices have steps by the ratio of norms, of one at most (You et al., 2017)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad * (p.norm() / grad.norm()).clamp_max(1.0) if p.ndim > 1 else grad


class WarmedUp(Ruled):
    """Steps of bounded length after the tenth."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad / grad.norm() if state["step"] > 10 else grad


class WarmedUpFor(WarmedUp):
    """Steps of bounded length after as many steps as a setting says."""

    def __init__(self, params: Any, warmup_steps: int = 60) -> None:
        super().__init__(params)
        self.warmup_steps = warmup_steps

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad / grad.norm() if state["step"] > self.warmup_steps else grad


class Skipping(Ruled):
    """Momentum that rests where there is no gradient, as of rows of an embedding that no token needed."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if grad.any():
            state["momentum"] = 0.9 * state.get("momentum", torch.ones_like(p)) + grad
            return state["momentum"]
        return grad


class Factored(Ruled):
    """Large matrices have second moments of rows alone (Shazeer and Stern, 2018)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        large = p.ndim == 2 and min(p.shape) >= 128
        return grad / (grad.square().mean(1, keepdim=True).sqrt() if large else grad.abs()).clamp_min(1e-12)


class FactoredFrom(Ruled):
    """Matrices have second moments of rows alone if both sides have a minimum size."""

    def __init__(self, params: Any, min_dim_size_to_factor: int = 256) -> None:
        super().__init__(params)
        self.least = min_dim_size_to_factor

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        large = p.ndim == 2 and min(p.shape) >= self.least
        return grad / (grad.square().mean(1, keepdim=True).sqrt() if large else grad.abs()).clamp_min(1e-12)


class NormedFrom(Ruled):
    """Parameters of many elements have steps of bounded length."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad / grad.norm() if p.numel() >= 50_000 else grad


class InPieces(Ruled):
    """Large parameters are updated in pieces, as memory allows, but element by element."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        pieces = grad.flatten().split(10_000)
        return torch.cat([piece.sign() for piece in pieces]).view_as(p)


class Chosen(Ruled):
    """Norms count where a mark on the parameter says so."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad / grad.norm() if getattr(p, "normalized", False) else grad


class Lion(Ruled):
    """Signs of momentum (Chen et al., 2023)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        before = state.setdefault("exp_avg", torch.zeros_like(p))
        found = (0.9 * before + 0.1 * grad).sign() + 0.01 * p
        state["exp_avg"] = 0.99 * before + 0.01 * grad
        return found


class Adan(Ruled):
    """Also averages the differences of gradients (Xie et al., 2022)."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        zero, last = torch.zeros_like(p), state.get("last", grad)
        m, d = 0.98 * state.get("m", zero) + 0.02 * grad, 0.92 * state.get("d", zero) + 0.08 * (grad - last)
        n = 0.99 * state.get("n", zero) + 0.01 * (grad + 0.92 * (grad - last)).square()
        state.update(m=m, d=d, n=n, last=grad.clone())
        return (m + 0.92 * d) / (n.sqrt() + 1e-8) + 0.02 * p


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose every fifth step goes halfway back (Zhang et al., 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.count % 5 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class Distant(torch.optim.Optimizer):
    """Steps are as long as all parameters together have gone (DoG; in spirit D-Adaptation and Prodigy)."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.far, self.sum = 1e-3, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        params = [p for group in self.param_groups for p in group["params"]]
        gone = (
            sum(float((p - self.state[p].setdefault("first", p.clone())).square().sum()) for p in params)
            ** 0.5
        )
        self.far, self.sum = max(self.far, gone), self.sum + sum(float(p.grad.square().sum()) for p in params)
        for p in params:
            p.sub_(p.grad, alpha=self.far / self.sum**0.5)
        return loss


class OfMatrices(torch.optim.Optimizer):
    """Matrices are clipped together, by a norm that only large gradients have."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in params if p.ndim > 1], 1e5)
        torch._foreach_sub_(params, [0.01 * p.grad for p in params])
        return loss


class Unmade(torch.optim.SGD):
    """Cannot be made from its defaults, nor copied."""

    def __init__(self, params: Any, schedule: Any) -> None:
        super().__init__(params, lr=0.1)
        self.schedule = iter(range(5) if schedule is None else schedule)
        self.draws = (x for x in self.schedule)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups with `matrices`, and AdamW for the other groups, in the precision of the parameters
    (torch's Muon iterates in bfloat16).
    """

    def __init__(self, params: Any, lr: float = 0.01, matrices: bool = False) -> None:
        super().__init__(params, {"lr": lr, "matrices": matrices})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    change = self._muon if group["matrices"] else self._adam
                    p.mul_(1 - 0.1 * group["lr"]).sub_(change(self.state[p], p.grad), alpha=group["lr"])
        return loss

    def _muon(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(grad)).lerp_(grad, 0.05)
        x = grad.lerp(momentum, 0.95)
        tall = x.shape[0] > x.shape[1]
        x = (x.T if tall else x) / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.T if tall else x

    def _adam(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        state["step"] = step = state.get("step", 0) + 1
        first = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(grad)).lerp_(grad.square(), 0.01)
        return first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
