"""Batch norms with the statistics of the whole batch, however it is divided over replicas. They serve
`nn.SyncBatchNorm`, and with `Trainer(sync_batchnorm=True)` all batch norms, in captured and uncaptured steps.

Each replica sums over its samples, channel by channel. The sums are added up (`totals.total`), and mean and
variance are computed from them. The variance of a replica is computed around its own mean, which is
well-conditioned in any dtype. Only the differences between replicas come from differences of sums, which are
float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_piper.totals import total


@contextlib.contextmanager
def whole_batch_norms(every: bool) -> Iterator[None]:
    """Return a context in which `nn.SyncBatchNorm`, in training, uses the statistics of the whole batch.

    The context works on any device and needs no process group.

    Args:
        every: Whether all other batch norms also use the statistics of the whole batch.
    """
    with _forward_of_synchronized(_over_whole), _WholeBatch() if every else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def plain_batch_norms() -> Iterator[None]:
    """Return a context in which `nn.SyncBatchNorm` is a plain batch norm. Use this context only if this
    process has the samples of the whole batch.
    """
    with _forward_of_synchronized(nn.BatchNorm1d.forward):
        yield


@contextlib.contextmanager
def _forward_of_synchronized(forward: Any) -> Iterator[None]:
    own = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = own  # type: ignore[method-assign]


def _over_whole(module: Any, x: torch.Tensor) -> torch.Tensor:
    with _WholeBatch():
        # BatchNorm1d's forward serves all numbers of dimensions, because each module checks its own.
        return nn.BatchNorm1d.forward(module, x)


class _WholeBatch(TorchFunctionMode):
    """A mode in which `F.batch_norm`, in training, uses the statistics of the whole batch."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Like `F.batch_norm`, but in training with the statistics of the whole batch. In half precision, compute
    in float32. Also update the running statistics."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    given, x = x.dtype, x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    count, mean, var = _statistics(x)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.copy_((1 - momentum) * running_mean + momentum * mean.to(running_mean.dtype))
        if running_var is not None:
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_var.copy_((1 - momentum) * running_var + momentum * unbiased.to(running_var.dtype))
    channels = (1, -1, *[1] * (x.dim() - 2))
    scale = torch.rsqrt(var + eps).to(x.dtype)
    made = (x - mean.to(x.dtype).view(channels)) * (scale if weight is None else scale * weight).view(
        channels
    )
    return (made if bias is None else made + bias.view(channels)).to(given)


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return statistics of the whole batch: the number of values per channel (shape `[1]`), and the mean and
    the biased variance of each channel (`[channels]`). All three tensors are float64.
    """
    var, mean = (found.double() for found in torch.var_mean(x, [0, *range(2, x.dim())], correction=0))
    here = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    channels = x.shape[1]
    count, sums, squares = total(torch.cat([here, here * mean, here * (var + mean * mean)])).split(
        [1, channels, channels]
    )
    mean = sums / count
    return count, mean, (squares / count - mean * mean).clamp(min=0)
