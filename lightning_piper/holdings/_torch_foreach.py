"""The only use of torch's private function `torch._foreach_mul_(tensors, factor)`, tested with torch 2.11 and
2.13.

It multiplies many tensors in place by a number or by a tensor of one element. On a GPU it takes few kernels;
a loop takes one for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scale(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place. If the factor is a tensor, it has one element, and is first rounded to each
    tensor's dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        by_dtype.setdefault(x.dtype, []).append(x)
    for dtype, alike in by_dtype.items():
        torch._foreach_mul_(alike, factor.to(dtype) if isinstance(factor, torch.Tensor) else factor)
