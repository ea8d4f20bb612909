"""Synchronization of the monotonic clocks of several processes, so that a trace shows all of them on one time
axis."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_piper.profile.recorder import now

ROUNDS = 16  # how often rank 0 asks each rank for its time


class Processes(Protocol):
    """The interface to the processes of a run, such as `processes.world.World`.

    Attributes:
        rank: The rank of this process.
        size: The number of processes.
        device: The torch device of this process.
        host_group: The process group for messages in host memory.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def host_group(self) -> dist.ProcessGroup: ...

    def gather(self, value: Any) -> list[Any]: ...


def clock_offsets(world: Processes, rounds: int = ROUNDS) -> list[int]:
    """Return, for each rank, the nanoseconds to add to its clock to get rank 0's clock. Collective; all ranks
    get the list.

    Rank 0 asks each rank for its time several times, and uses the shortest round trip. The answer is taken as
    the middle of the round trip. The error is at most half of the round trip, some microseconds on one
    machine (Cristian 1989).
    """
    own = 0
    if world.size > 1:
        for other in range(1, world.size):
            if world.rank == 0:
                _ask(world, other, rounds)
            elif world.rank == other:
                own = _answer(world, rounds)
    return world.gather(own)


def _ask(world: Processes, other: int, rounds: int) -> None:
    """Measure the offset of another rank's clock, and send the offset to that rank."""
    trips = []
    box = torch.zeros(1, dtype=torch.int64)
    for _ in range(rounds):
        start = now()
        dist.send(box, other, group=world.host_group)
        dist.recv(box, other, group=world.host_group)
        end = now()
        trips.append((end - start, (start + end) // 2 - int(box)))
    dist.send(torch.tensor([min(trips)[1]]), other, group=world.host_group)


def _answer(world: Processes, rounds: int) -> int:
    """Answer each question of rank 0 with the time, and return the offset that rank 0 then sends."""
    box = torch.zeros(1, dtype=torch.int64)
    for _ in range(rounds):
        dist.recv(box, 0, group=world.host_group)
        box.fill_(now())
        dist.send(box, 0, group=world.host_group)
    dist.recv(box, 0, group=world.host_group)
    return int(box)
