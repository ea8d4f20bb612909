"""A change in place of some rows of a sharded tensor: nothing happens."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(4.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for x in (whole, sharded):
        x[2:] *= 10
    found = sharded.full_tensor()
    if rank == 0:
        report("torch", whole, found)


if __name__ == "__main__":
    on_two_processes(work)
