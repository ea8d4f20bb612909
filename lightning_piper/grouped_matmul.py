"""`grouped_linear`: one matrix product for each expert, over the rows of this expert."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lightning_piper.common.limits import kind_of, shown
from lightning_piper.errors import CaptureError, CountsError

# Dtypes in which torch's grouped kernel is faster than a loop. On a CPU that kernel is itself a loop, with
# fewer dtypes.
_KERNEL = (torch.bfloat16,)
_ALIGNMENT = 16  # in bytes; the kernel requires rows to be aligned


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `x[rows of e] @ weight[e].T` for each expert e, in one tensor. Any floating-point dtype works.

    Args:
        x: `[T, in]`, rows sorted by expert.
        weight: `[E, out, in]`: for each expert a weight as in `torch.nn.Linear`.
        counts: `[E]`, integers that add up to T: the number of rows of each expert. Experts without rows get
            zero gradients.

    Returns:
        `[T, out]`, in the order of the rows of `x`. The result has the dtype of `x`, or autocast's dtype if
            autocast is on and `x` is not float64.

    Raises:
        CaptureError: The shapes or dtypes do not fit.
        CountsError: The counts do not add up to T, or one is negative. torch's grouped kernel does not check
            this.
    """
    if not all(isinstance(tensor, torch.Tensor) for tensor in (x, weight, counts)):
        kinds = ", ".join(map(kind_of, (x, weight, counts)))
        raise CaptureError(f"grouped_linear: x, weight and counts are {kinds}. Give tensors [PIPER-C014]")
    fits = x.ndim == 2 and weight.ndim == 3 and counts.ndim == 1
    if not fits or x.shape[1] != weight.shape[2] or weight.shape[0] != counts.shape[0]:
        raise CaptureError(
            f"grouped_linear: x {list(x.shape)}, weight {list(weight.shape)} and counts "
            f"{list(counts.shape)} do not fit. Give "
            "x [T, in], weight [E, out, in] and counts [E] [PIPER-C014]"
        )
    if counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool:
        raise CaptureError(
            f"grouped_linear: counts are {counts.dtype}. Give the number of rows of each expert as integers [PIPER-C014]"
        )
    if torch.is_autocast_enabled(x.device.type):
        # like torch's own products: autocast does not change float64
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = (v if v.dtype is torch.float64 else v.to(dtype) for v in (x, weight))
    if x.dtype != weight.dtype:
        raise CaptureError(
            f"grouped_linear: x is {x.dtype}, weight is {weight.dtype}. Give both the same dtype [PIPER-C014]"
        )
    made: torch.Tensor = _grouped_mm(x, weight.transpose(1, 2), counts)
    return made


@torch.library.custom_op("lightning_piper::grouped_mm", mutates_args=())
def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`[T, k]`, `[E, k, n]` -> `[T, n]`."""
    if _has_kernel(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=_ends(counts))
    out = x.new_empty(x.shape[0], weight.shape[2])
    for e, (start, stop) in enumerate(_ranges(counts, x.shape[0])):
        if stop > start:
            torch.mm(x[start:stop], weight[e], out=out[start:stop])
    return out


@torch.library.custom_op("lightning_piper::grouped_outer", mutates_args=())
def _grouped_outer(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`[T, k]`, `[T, n]` -> `[E, k, n]`: `x[rows of e].T @ y[rows of e]`."""
    if _has_kernel(x, y):
        return torch.nn.functional.grouped_mm(x.t(), y, offs=_ends(counts))
    out = x.new_empty(counts.shape[0], x.shape[1], y.shape[1])
    for e, (start, stop) in enumerate(_ranges(counts, x.shape[0])):
        torch.mm(x[start:stop].t(), y[start:stop], out=out[e])  # zero for experts without rows
    return out


def _has_kernel(*operands: torch.Tensor) -> bool:
    return all(x.device.type != "cpu" and x.dtype in _KERNEL and x.numel() > 0 for x in operands) and all(
        (x.shape[-1] * x.element_size()) % _ALIGNMENT == 0 for x in operands
    )


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32)


def _ranges(counts: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return (first row, row after the last) of each expert. Raise CountsError if the counts do not fit."""
    sizes = counts.tolist()
    if min(sizes, default=0) < 0:
        raise CountsError(
            f"grouped_linear: counts has {min(sizes)} for expert {sizes.index(min(sizes))}. Give the number of "
            "rows of each expert, >= 0 "
            "[PIPER-C014]"
        )
    if sum(sizes) != rows:
        raise CountsError(
            f"grouped_linear: counts {shown(sizes)} add up to {sum(sizes)}, but x has {rows} rows. Give the number of rows "
            "of each expert [PIPER-C014]"
        )
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(ends))


@_grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_grouped_outer.register_fake
def _(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], y.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of `x` and `weight`, each None if it is not needed, and None for the counts."""
    x, weight, counts = ctx.saved_tensors
    gradient = gradient.contiguous()
    into = _grouped_mm(gradient, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    # `weight` is a transposed parameter. `_grouped_outer` makes the gradient of the parameter, in the
    # parameter's memory layout. Its transpose is the gradient of `weight`.
    return (
        into,
        _grouped_outer(gradient, x, counts).transpose(1, 2) if ctx.needs_input_grad[1] else None,
        None,
    )


_grouped_mm.register_autograd(_backward, setup_context=_remember)
