"""Steps with all devices on one accelerator, or with one accelerator for each process, and the comparison of
their results. On a CPU the same steps run with small sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_piper as piper
from lightning_piper.directives import Offload, Recompute, Replicate
from lightning_piper.ops.base import Bound
from lightning_piper.runtime import Executor, LocalTransport, joined, run_local, shards_of
from lightning_piper.runtime.executor import Observer
from tests.strategy.fitting import QUIET

GROUPS = [[0, 2], [1, 3]]
BOTH: dict[str, Any] = {"filter": {}, "devices": [0, 1]}
PROGRAMS: dict[str, list[Any]] = {
    "1F1B": piper.schedules.one_f_one_b(2, 4),
    "zero bubble": piper.schedules.zero_bubble(2, 4),
    "ZeRO-3": [
        *piper.schedules.one_f_one_b(2, 2, devices=GROUPS),
        Replicate(filter={}, devices=GROUPS, shard_params=True),
    ],
    "stored on the host": [
        *piper.schedules.one_f_one_b(2, 2),
        Recompute(filter={}),
        Offload(filter={}, ahead=1),
    ],
}
ON_TWO: dict[str, list[Any]] = {
    "1F1B": piper.schedules.one_f_one_b(2, 4),
    "replicas": [piper.Place(**BOTH), Replicate(**BOTH)],
    "ZeRO-1": [piper.Place(**BOTH), Replicate(**BOTH, shard_optimizer=True)],
    "ZeRO-2": [piper.Place(**BOTH), Replicate(**BOTH, shard_grads=True)],
    "ZeRO-3": [piper.Place(**BOTH), Replicate(**BOTH, shard_params=True)],
}


def _stage(width: int, layers: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)))
    )


class Deep(L.LightningModule):
    """Layers with dropout in two stages. Batch: `[n, width]`."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(_stage(width, layers, dropout) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                batch = stage(batch)
        with piper.annotate("PP", 1):
            return F.mse_loss(batch, torch.zeros_like(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def slowed(seed: int, wait: Callable[[int], None], cycles: int = 200_000) -> Observer:
    """An observer of an executor that lets streams fall behind here and there.

    Args:
        wait: Occupies the current stream for a number of cycles.
    """
    draw = random.Random(seed)

    def late(bound: Bound) -> Bound:
        def call() -> object:
            if draw.random() < 0.3:
                wait(draw.randrange(cycles))
            return bound()

        return call

    return lambda code, source: [late(bound) for bound in code]


def gradients(
    program: Sequence[Any],
    device: torch.device,
    observers: Sequence[Any],
    width: int = 64,
    layers: int = 3,
    rows: int = 16,
) -> list[dict[str, Tensor]]:
    """The whole gradients of a step and its loss, once for each of these observers. The executors are the
    same for all of them.
    """
    module, batch = Deep(width, layers, dropout=0.1).to(device), torch.randn(rows, width, device=device)
    compiled = piper.compile(module, batch, list(program), device=device)
    params = {name: x.detach() for name, x in module.named_parameters()}
    transport = LocalTransport(compiled.plans)
    executors = [Executor(plan, compiled.step, params, {}, transport, device, shards_of(plan, params, device))
                 for plan in compiled.plans.values()]  # fmt: skip
    found = []
    for observer in observers:
        for executor in executors:
            executor.observer = observer
        results = run_local(executors, [batch], seed=7)
        found.append({**joined([e.plan for e in executors], results), "metrics": results[0].metrics})
        found[-1] = {name: x.clone() for name, x in found[-1].items()}
    return found


def fitted(
    strategy: Any, accelerator: str, devices: int = 1, rank: int = 0, steps: int = 4, width: int = 64
) -> dict[str, Tensor]:
    """The parameters after some steps of a fit. The model has no dropout, because the replicas of a local run
    divide a batch into halves, while processes take every second sample of it.
    """
    module = Deep(width, 2, dropout=0.0)
    data = torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    replicas = (
        max(piper.directives.replicas_of(strategy._program).values(), default=0) + 1 if devices > 1 else 1
    )
    sampler: Any = DistributedSampler(data, replicas, rank, shuffle=False) if replicas > 1 else None  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=16 // replicas, sampler=sampler)  # type: ignore[arg-type]
    options = {**QUIET, "accelerator": accelerator, "devices": devices, "max_steps": steps, "max_epochs": 9}
    trainer = L.Trainer(strategy=strategy, **options)
    trainer.fit(module, loader)
    return {name: x.detach().cpu().clone() for name, x in module.state_dict().items()}


def train(rank: int, accelerator: str, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """For each of the named programs, the parameters after a fit over two processes."""
    return {name: fitted(piper.PiperStrategy(ON_TWO[name]), accelerator, 2, rank) for name in names}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
