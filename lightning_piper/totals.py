"""`total`: values of a step, summed over the replicas and microbatches of the batch.

    count, sums = total(x.new_tensor(len(x))), total(x.sum(0))        # over all samples of the batch

On one device that has the whole batch, `total` is the identity. A captured step is cut at each call of
`total`. The code that makes the terms and the code that reads their sum are separate passes, and the program
puts the sum between them. The gradient of each term is the gradient of the sum. All readers of the sum
contribute to this gradient, so the gradient is also summed over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Sum = Callable[[torch.Tensor], torch.Tensor]

# Sums over the replicas in a step that runs uncaptured; None for other steps.
_sum: Sum | None = None


def total(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over all parts of the batch. Outside of a step that Piper runs, return a copy of
    `x`."""
    made: torch.Tensor = _total(x) if _sum is None else _Summed.apply(x)  # type: ignore[no-untyped-call]
    return made


@contextmanager
def summing(over: Sum) -> Iterator[None]:
    """Return a context in which `total` and its backward pass sum immediately, with this function. Do not
    capture a step inside of it."""
    global _sum
    before, _sum = _sum, over
    try:
        yield
    finally:
        _sum = before


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert _sum is not None
        ctx.over = _sum  # kept, because the backward pass may run after the context `summing`
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = ctx.over(gradient)
        return made


@torch.library.custom_op("lightning_piper::total", mutates_args=())
def _total(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x`. In a captured graph, this operation stands for the sum."""
    return x.clone(memory_format=torch.contiguous_format)


@_total.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _total(gradient)
    return made


_total.register_autograd(_backward)

TOTAL = torch.ops.lightning_piper.total.default
