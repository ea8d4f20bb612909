"""Messages between the processes of a communicator: how they get there. Who sends what to whom is the caller's matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """What is under way: see `torch.distributed.Work`."""

    def wait(self) -> Any: ...


class Messages:
    """Messages as the communicator's backend carries them.

    Attributes:
        group: the communicator. Ranks are those in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, x: torch.Tensor, ranks: Sequence[int]) -> list[Work]:
        """Start to send a contiguous tensor, which is not to be changed until the works are done."""
        return [self.group.send([x], rank, 0) for rank in ranks]

    def receive(self, into: torch.Tensor, rank: int) -> Work:
        """Start to receive what this rank sends, which has this size and dtype, into a contiguous tensor."""
        return self.group.recv([into], rank, 0)

    def close(self) -> None:
        """Give the communicator back. Collective."""
        dist.destroy_process_group(self.group)
