"""A gather from sharded columns with fewer columns of indices: the second process reads the wrong columns."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    table, rows = torch.arange(8.0).view(2, 4), torch.tensor([[1, 0]])
    sharded = [distribute_tensor(each, mesh, [Shard(1)]) for each in (table, rows)]
    found = sharded[0].gather(0, sharded[1]).full_tensor()
    if rank == 0:
        report("torch", table.gather(0, rows)[0], found[0])


if __name__ == "__main__":
    on_two_processes(work)
