"""An optimizer's step as several: some of the parameters, then the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def only(optimizer: Optimizer, chosen: Iterable[Tensor]) -> Iterator[None]:
    """Its groups have of their parameters these alone."""
    whole, chosen = [list(group["params"]) for group in optimizer.param_groups], set(chosen)
    try:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = [p for p in params if p in chosen]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = params
