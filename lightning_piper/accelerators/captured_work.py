"""Graphs of the simulated accelerator: operations that were captured, to be issued again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lightning_piper.accelerators.conflicts import Access, Note
from lightning_piper.accelerators.queues import QueuedWork

if TYPE_CHECKING:
    from lightning_piper.accelerators.simulated_device import Simulated


class CapturedWork:
    """A graph. Its operations use the memory that they had in the capture, even if the program has released it. The
    memory that the graph allocated stays allocated.
    """

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        # (name of an operation, the memory that it uses, function that runs it)
        self._work: list[tuple[str, list[Access], Callable[[Note], None]]] = []
        self._memory: list[torch.Tensor] = []

    def add(
        self, what: str, accesses: list[Access], run: Callable[[Note], None], made: list[torch.Tensor]
    ) -> None:
        """Add an operation, which made the tensors `made`."""
        self._work.append((what, accesses, run))
        self._memory += made

    def replay(self) -> None:
        """Issue all operations to the current stream."""
        queue = self._simulated.host.current.queue
        for what, accesses, run in self._work:
            note = self._simulated.note(what, queue, accesses)
            queue.issue(QueuedWork(what, lambda run=run, note=note: run(note)))  # type: ignore[misc]
