"""A mean squared error of sharded tensors whose rows do not divide by the number of processes."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import mse_loss

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, y = torch.arange(5.0), torch.zeros(5)
    x_sharded, y_sharded = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y))
    loss = mse_loss(x_sharded, y_sharded).full_tensor()
    if rank == 0:
        report("torch", mse_loss(x, y), loss)


if __name__ == "__main__":
    on_two_processes(work)
