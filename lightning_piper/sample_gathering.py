"""`gather_samples`: values of the whole batch, joined over its microbatches and replicas.

    z = piper.gather_samples(self.encoder(x))        # the rows of all samples of the batch
    loss = contrastive(z)                            # runs once on each replica, on the whole batch

On one device that has the whole batch, `gather_samples` is the identity. A captured step is cut at each call.
All computation from a gathered value is a separate part of the step, which no program divides along the
batch. Other values that this part reads are also gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_piper.common.limits import shown
from lightning_piper.errors import CaptureError

# This process's rows -> the rows of all replicas.
Gather = Callable[[torch.Tensor], torch.Tensor]
# Gradients of all rows, number of this process's rows -> gradients of this process's rows.
Scatter = Callable[[torch.Tensor, int], torch.Tensor]

# How a step that runs uncaptured exchanges rows with the other replicas; None for other steps.
_exchange: tuple[Gather, Scatter] | None = None
_captured = False  # whether the running code is being traced


def gather_samples(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of `x` of all samples of the batch, in the order in which one device has them.

    Values that follow from the result are computed from the whole batch, as on one device (see docs/losses.md).
    In a step that runs uncaptured, only the given rows are joined,
    over the processes.

    Args:
        x: `[n, ...]`, one row for each sample. If a sample has several rows, such as its views:
            `[n, views, ...]`.

    Returns:
        `[N, ...]` for the N samples of the whole batch, joined over its microbatches and replicas. Gradients
            reach each row once. On one device that has the whole batch, and under a plain Trainer, these are
            the rows of `x`.

    Raises:
        CaptureError: `x` is not a tensor with one row for each sample.
    """
    if not isinstance(x, torch.Tensor) or not x.ndim:
        found = f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else shown(x)
        raise CaptureError(
            f"gather_samples: x is {found}. Give a tensor with one row for each sample, [n, ...] [PIPER-C013]"
        )
    if _exchange is not None:
        made: torch.Tensor = _Exchanged.apply(x)  # type: ignore[no-untyped-call]
        return made
    return _gather(x) if _captured else x


@contextmanager
def gathering() -> Iterator[None]:
    """Return a context in which a capture sees `gather_samples`. A capture enters the context for each traced
    run of a step."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


@contextmanager
def exchanging_rows(gather: Gather, scatter: Scatter) -> Iterator[None]:
    """Return a context in which `gather_samples` joins rows immediately, with `gather`. Do not capture a
    step inside of it.

    The backward pass calls `scatter` with the gradients of all rows and the number of this process's rows.
    """
    global _exchange
    before, _exchange = _exchange, (gather, scatter)
    try:
        yield
    finally:
        _exchange = before


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert _exchange is not None
        # Keep `scatter`, because the backward pass may run after the context `exchanging_rows`.
        gather, ctx.scatter = _exchange
        ctx.count = len(x)
        return gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = ctx.scatter(gradient, ctx.count)
        return made


@torch.library.custom_op("lightning_piper::gather_samples", mutates_args=())
def _gather(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x`. In a captured graph, this operation shows where computation from the whole batch
    begins."""
    return x.clone(memory_format=torch.contiguous_format)


@_gather.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


_gather.register_autograd(_backward)

GATHER = torch.ops.lightning_piper.gather_samples.default
