"""The work of the ranks in test_sums.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_piper.runtime.collectives import FEW, Members
from lightning_piper.runtime.messages import Messages

SIZE = 3


def values(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return values of very different magnitudes, so that their sum depends on the order of the terms."""
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (made * 10.0 ** (3 * rank)).to(dtype)


def sums(rank: int) -> list[tuple[bool, torch.Tensor]]:
    """Return for each dtype and size whether the sum was made by an exchange, and the sum. The members are
    not in the order of their ranks.
    """
    order = [2, 0, 1]
    members = Members(Messages(dist.group.WORLD), order, rank, native=False)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        many = FEW // (SIZE - 1) // dtype.itemsize
        for numel in (0, 1, 17, many, many + 1):
            x = values(rank, dtype, numel)
            work, x = members.add_up(x)
            work.wait()
            found.append((not isinstance(work, dist.Work), x))
    return found
