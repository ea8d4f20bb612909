"""A cross entropy of scores that are sharded by rows, if the processes have different numbers of ignored labels."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import cross_entropy

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    scores = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [0.0, 0.0]])
    labels = torch.tensor([0, 1, 0, -100])  # the process with the last two rows has one label
    sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (scores, labels)]
    loss = cross_entropy(*sharded).full_tensor()
    if rank == 0:
        report("torch", cross_entropy(scores, labels), loss)


if __name__ == "__main__":
    on_two_processes(work)
