"""Values of a step that are summed over the replicas, and over the microbatches, of the batch.

    count, sums = total(x.new_tensor(len(x))), total(x.sum(0))        of all samples of the batch, wherever they are

On one device that has the whole batch this is the identity. A captured step is cut there: what makes the terms is a pass of its
own, what reads their sum another one, and between them a program puts the sum. The gradient of each term is that of the sum,
to which all who read it contribute: so it is summed over the replicas, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Sum = Callable[[torch.Tensor], torch.Tensor]

_sum: Sum | None = None  # what sums over the replicas in a step that runs as it is


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of `x` over all parts of the batch."""
    made: torch.Tensor = _total(x) if _sum is None else _Summed.apply(x)  # type: ignore[no-untyped-call]
    return made


@contextmanager
def summing(over: Sum) -> Iterator[None]:
    """Inside, `total` sums with this function at once, and so does its backward pass; no step is captured meanwhile."""
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
        ctx.over = _sum  # the backward pass may come after `summing`
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = ctx.over(gradient)
        return made


@torch.library.custom_op("lightning_piper::total", mutates_args=())
def _total(x: torch.Tensor) -> torch.Tensor:
    """Stands in a captured graph for the sum. Run by itself, an identity."""
    return x.clone(memory_format=torch.contiguous_format)


@_total.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _total(gradient)
    return made


_total.register_autograd(_backward)

TOTAL = torch.ops.lightning_piper.total.default
