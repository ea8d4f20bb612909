"""Runs an optimizer's step as several steps, each for some of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def only(optimizer: Optimizer, chosen: Iterable[Tensor]) -> Iterator[None]:
    """Restrict the optimizer's groups to the chosen parameters inside of this context. The groups stay, even
    those without a chosen parameter."""
    whole, chosen = [list(group["params"]) for group in optimizer.param_groups], set(chosen)
    try:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = [p for p in params if p in chosen]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = params


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the `step` function of the optimizer's class, which takes the optimizer. Unlike
    `optimizer.step`, it does not run hooks, and learning rate schedulers do not count it."""
    step: Any = type(optimizer).step
    # torch marks a `step` that it has wrapped with `hooked`.
    own: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own
