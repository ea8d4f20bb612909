"""A factor that is true if any element of a sharded tensor is above 1: it counts once for each process."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    right, found = (x * (x > 1).any() for x in (whole, sharded))
    found = found.full_tensor()
    if rank == 0:
        report("torch", right, found)


if __name__ == "__main__":
    on_two_processes(work)
