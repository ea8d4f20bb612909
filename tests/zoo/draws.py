"""Replaces random numbers by fixed ones: every sample gets the same numbers, whichever process draws them and
however often.

Each process draws its own numbers, and a captured step draws in another order than a plain one; with fixed
numbers the trainings can be compared. Python's `random` and `numpy.random` start from the same seed
everywhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


def _rows(shape: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Numbers between 0 and 1 that depend on the place within a sample."""
    shape = tuple(shape)
    row = 0.5 + 0.49 * torch.sin(
        1.7 * torch.arange(1, math.prod(shape[1:]) + 1, dtype=torch.float64, device=device)
    )
    row = row.to(dtype or torch.get_default_dtype())
    return row.view(1, *shape[1:]).expand(shape).clone() if shape else row[0]


def _shape(size: tuple[Any, ...]) -> Any:
    return size[0] if len(size) == 1 and not isinstance(size[0], int | torch.SymInt) else size


def rand(*size: Any, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
    return _rows(_shape(size), dtype, device)


def randn(*size: Any, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
    return 4 * rand(*size, dtype=dtype, device=device) - 2


def rand_like(x: Tensor, **more: Any) -> Tensor:
    return _rows(x.shape, x.dtype, x.device)


def randn_like(x: Tensor, **more: Any) -> Tensor:
    return 4 * rand_like(x) - 2


def randint(low: int, high: Any, size: Any = None, device: Any = None, **more: Any) -> Tensor:
    if size is None:
        low, high, size = 0, low, high
    return (low + (high - low) * _rows(size, None, device)).long()


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * (rand_like(x) > p) / (1 - p) if training and p > 0 else x


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Within this context, the functions with which steps draw return fixed numbers."""
    attention = F.scaled_dot_product_attention

    def certain(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attention(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **options)

    with contextlib.ExitStack() as patches:
        for function in (rand, randn, rand_like, randn_like, randint):
            patches.enter_context(mock.patch.object(torch, function.__name__, function))
        patches.enter_context(mock.patch.object(F, "dropout", dropout))
        patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", certain))
        yield
