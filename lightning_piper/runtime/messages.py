"""Point-to-point messages between the processes of a communicator. The caller decides who sends what to
whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class PendingWork(Protocol):
    """A running operation: see `torch.distributed.Work`."""

    def wait(self) -> Any: ...


class Messages:
    """Messages that the communicator's backend carries.

    Attributes:
        group: The communicator. All ranks here are ranks in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, x: torch.Tensor, ranks: Sequence[int]) -> list[PendingWork]:
        """Start to send a contiguous tensor. Do not change it until the works are done."""
        return [self.group.send([x], rank, 0) for rank in ranks]

    def receive(self, into: torch.Tensor, rank: int) -> PendingWork:
        """Start to receive a tensor from this rank into a contiguous tensor of the same size and dtype."""
        return self.group.recv([into], rank, 0)

    def close(self) -> None:
        """Destroy the communicator. Collective."""
        dist.destroy_process_group(self.group)
