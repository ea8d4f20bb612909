"""Zero bubble schedules over FSDP2 that frees parameters after use: gradients are lost.

Each process has two of four layers. The script prints the norms of the gradients of the four weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from examples.found.report import on_two_processes, report


def work(rank: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(4)]
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
    right = [layer[0].weight.grad.norm() for layer in layers]

    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    mine = [rank, rank + 2]
    for i in mine:
        layers[i].zero_grad()
        fully_shard(layers[i], mesh=mesh["dp"], reshard_after_forward=True)
    stages = [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in mine]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(x) if rank == 0 else schedule.step(target=y)

    norms = torch.zeros(4, dtype=torch.float64)
    for i in mine:
        grad = layers[i][0].weight.grad
        norms[i] = 0 if grad is None else grad.full_tensor().norm()
    dist.all_reduce(norms)
    if rank == 0:
        report("torch", torch.stack(right), norms)


if __name__ == "__main__":
    on_two_processes(work)
