"""The gradient of an embedding with `scale_grad_by_freq`: each process counts only the words of its own rows."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import embedding

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight, words = torch.ones(3, 1), torch.tensor([0, 1, 1, 1])
    shared = distribute_tensor(weight.clone(), mesh, [Replicate()])
    sharded = distribute_tensor(words, mesh, [Shard(0)])
    for x, w in ((words, weight), (sharded, shared)):
        w.requires_grad_()
        embedding(x, w, scale_grad_by_freq=True).sum().backward()
    found = shared.grad.full_tensor()
    if rank == 0:
        report("torch", weight.grad, found)


if __name__ == "__main__":
    on_two_processes(work)
