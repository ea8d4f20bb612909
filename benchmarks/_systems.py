"""A program of this package and torch's own ways to train, each as a step on the same chain of blocks, on CPU
with gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _models import Chain
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.nn.parallel import DistributedDataParallel

import lightning_piper as piper
from lightning_piper.runtime import Executor, ProcessTransport, local_shards_of, shards_of
from lightning_piper.search import Written

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
Step = Callable[[], None]


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def ours(chain: Chain, batch: Batch, written: Written, rank: int, world: int) -> tuple[Step, Executor]:
    """Return the step of one rank's plan with its optimizer, and the executor.

    Raises:
        PiperError: The program is not valid for this model.
    """
    module = copy.deepcopy(chain)
    written.annotate(module)
    compiled = piper.compile(module, batch, written.directives)
    plan = compiled.plans[rank]
    params = dict(module.named_parameters())
    shards = shards_of(plan, params, CPU)
    owned = {
        n: params[n] for n in compiled.params_on(rank) if not any(n in bucket.names for bucket in shards)
    }
    compiled.step.at(plan.local_batch_size)  # trace while the module has all its parameters
    for name, param in params.items():
        if name not in owned:
            param.data = torch.empty(0)
    trained = {**owned, **{name: nn.Parameter(x) for name, x in local_shards_of(plan, shards).items()}}
    transport = ProcessTransport(compiled.plans, ranks=range(world), device=CPU)
    executor = Executor(plan, compiled.step, owned, dict(module.named_buffers()), transport, CPU, shards)
    optimizer = optimizer_of(trained.values())
    part = slice(plan.replica * plan.local_batch_size, (plan.replica + 1) * plan.local_batch_size)
    leaves = [x[part] for x in batch]

    def step() -> None:
        result = executor.step(leaves, seed=0)
        for name in list(result.grads):
            trained[name].grad = result.grads.pop(name)
        optimizer.step()
        optimizer.zero_grad()

    return step, executor


def data_parallel(chain: Chain, batch: Batch, rank: int, world: int, sharded: bool) -> Step:
    """Return a step of DistributedDataParallel; with `sharded`, of FSDP2 on each block."""
    module = copy.deepcopy(chain)
    model: Any = nn.Sequential(*module.blocks)
    if sharded:
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = optimizer_of(model.parameters())
    rows = len(batch[0]) // world
    inputs, targets = (x[rank * rows : (rank + 1) * rows] for x in batch)

    def step() -> None:
        module.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(
    chain: Chain, batch: Batch, cuts: Sequence[int], microbatches: int, rank: int, world: int
) -> Step:
    """Return a step of one of torch's pipelines: DualPipeV, with two stages on each rank along a V, if there
    are `2 * world` stages, otherwise Schedule1F1B, with one stage on each rank.

    `cuts` are the first blocks of the stages after the first.
    """
    module = copy.deepcopy(chain)
    edges = [0, *cuts, len(module.blocks)]
    folded = len(edges) - 1 == 2 * world
    places = [rank, 2 * world - 1 - rank] if folded else [rank]
    parts = [nn.Sequential(*module.blocks[edges[s] : edges[s + 1]]) for s in places]
    stages = [PipelineStage(part, s, len(edges) - 1, CPU) for part, s in zip(parts, places, strict=True)]
    schedule: Any = (
        ScheduleDualPipeV(stages, microbatches, loss_fn=module.loss)
        if folded
        else Schedule1F1B(stages[0], microbatches, loss_fn=module.loss)
    )
    params = [p for part in parts for p in part.parameters()]
    optimizer = optimizer_of(params) if params else None
    inputs, targets = batch
    last = len(edges) - 2 in places

    def step() -> None:
        schedule.step(
            *([inputs] if 0 in places else []),
            target=targets if last else None,
            losses=[] if last else None,
            return_outputs=False,
        )
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step
