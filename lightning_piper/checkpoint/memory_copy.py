"""A copy of a fit's state in memory, from which the fit continues if it loses a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_piper.checkpoint.late_copies import HostRoom, LateCopies
from lightning_piper.checkpoint.snapshot import snapshot
from lightning_piper.processes.world import World

MEMORY = "memory"  # the path of this copy, as the Trainer shows it


class MemoryCopy:
    """The state of the fit at the start of the current batch, on one process.

    Attributes:
        number: The number of batches done before, in all epochs; -1 if there is no copy.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Keep no copy."""
        self.number, self._room = -1, HostRoom()
        self._content: Callable[[], dict[str, Any]] = dict

    def keep(self, content: dict[str, Any], number: int) -> None:
        """Replace the copy by a copy of a checkpoint's content."""
        self._content, self.number = snapshot(content, LateCopies(self._room)), number

    def take(self, world: World) -> dict[str, Any]:
        """Return the latest copy of all processes, and keep no copy. Collective.

        A process whose copy is older, such as a spare, gets the copy of another process.
        """
        numbers = world.gather(self.number)
        latest = max(numbers)
        source, content = numbers.index(latest), self._content()
        for rank, number in enumerate(numbers):
            if number < latest:
                content = world.move_object(content, source, rank) or content
        self.forget()  # the fit may continue with tensors of the copy
        return content
