"""The gradient of `amax` of a sharded tensor, if the maximum is not on the first process."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.tensor([1.0, 2.0, 5.0, 3.0])
    sharded = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    for x in (whole, sharded):
        x.requires_grad_()
        x.amax().backward()
    found = sharded.grad.full_tensor()
    if rank == 0:
        report("torch", whole.grad, found)


if __name__ == "__main__":
    on_two_processes(work)
