"""The only use of torch's private functions on many tensors, tested with torch 2.11 and 2.13. On a GPU they
take few kernels; a loop takes one for each tensor.

- `torch._foreach_mul_(tensors, factor)` multiplies tensors in place by a number or by a tensor of one
  element.
- `torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)` sets `found` to 1 if an element is
  NaN or infinite, and multiplies the tensors in place. With the factor 1, all bits stay.
"""

from __future__ import annotations

import functools
import math
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


LARGE = 2**14  # elements from which on the sum on a CPU is faster than a check that also writes


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def any_nonfinite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a float32 tensor of one element on `device`, which is not 0 if an element of the tensors is NaN
    or infinite. On a CPU it may also be not 0 because a sum of large elements overflows.

    The host does not wait for the result. The tensors keep their bits.
    """
    with torch.no_grad():
        found, host = torch.zeros(1, device=device), device.type == "cpu"
        checked = []
        for x in tensors:
            if not host or x.numel() < LARGE or x.dtype.is_complex:
                checked.append(x)
            elif not math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()):
                found.fill_(1.0)
        if checked:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(checked, found, _one(device))
            except (RuntimeError, NotImplementedError):
                # different dtypes or devices, complex numbers, expanded gradients, and classes of their own
                found = (
                    torch.stack([~x.isfinite().all().to(device) for x in checked])
                    .any()
                    .float()
                    .maximum(found)
                )
    return found
