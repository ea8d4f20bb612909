"""Trainings that resume from sharded checkpoints of other trainings, under other directives, on processes or
with all devices in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_piper as piper
from lightning_piper.directives import Directive, Replicate
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import Batches, sharing_captures, trainer, values
from tests.strategy.models import make

GROUPS = [[0, 2], [1, 3]]
BATCHES = 2  # batches in an epoch; each training ends at the end of an epoch


def replicas(**sharded: bool) -> list[Directive]:
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        Replicate(filter={}, devices=[0, 1], bucket_size=0.0005, **sharded),
    ]


def groups_of_replicas() -> list[Directive]:
    """Two groups of two replicas. Each group has all shards."""
    return [
        piper.Place(filter={}, devices=[0, 1, 2, 3]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        Replicate(filter={}, bucket_size=0.0005, zero=3, shard_size=2),
    ]


def stages_of_replicas(first: dict[str, bool], second: dict[str, bool]) -> list[Directive]:
    return [
        *(piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(GROUPS)),
        *piper.schedules.one_f_one_b(stages=2, microbatches=2)[2:],
        *(
            Replicate(filter={"PP": stage}, devices=GROUPS[stage], bucket_size=0.0005, **sharded)
            for stage, sharded in enumerate((first, second))
        ),
    ]


@dataclass(frozen=True)
class How:
    """The directives, and the number of processes; 0: all devices are in this process."""

    program: Callable[[], list[Directive]]
    processes: int
    replicas: int = 1


ZERO1, ZERO2, ZERO3 = {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}
HOW = {
    "PP2 x DP2 ZeRO-3": How(lambda: stages_of_replicas(ZERO3, ZERO3), 4, 2),
    "PP2 x DP2 ZeRO-1 and 3": How(lambda: stages_of_replicas(ZERO1, ZERO3), 4, 2),
    "DP2 x 2 ZeRO-3": How(groups_of_replicas, 4, 4),
    "DP2 ZeRO-2": How(lambda: replicas(**ZERO2), 2, 2),
    "DP2 ZeRO-3": How(lambda: replicas(**ZERO3), 2, 2),
    "DP2": How(lambda: replicas(), 2, 2),
    "PP2": How(lambda: piper.schedules.gpipe(stages=2, microbatches=4), 2),
    "one device": How(
        lambda: [
            piper.Place(filter={}, devices=[0]),
            piper.Split(filter={}, dim_name="MB", num_microbatches=4),
        ],
        0,
    ),
    "DP2 ZeRO-3, one process": How(lambda: replicas(**ZERO3), 0),
}


def part(batch: Any, replicas: int, replica: int) -> Any:
    """The samples of a replica."""
    if replicas == 1:
        return batch
    if isinstance(batch, dict):
        return {name: x.chunk(replicas)[replica] for name, x in batch.items()}
    return [x.chunk(replicas)[replica] for x in batch]


@sharing_captures
def train(
    rank: int,
    how: str,
    model: str,
    path: Path,
    steps: int,
    resume: Path | None,
    kind: str = "sharded",
    **options: Any,
) -> dict[str, Any]:
    """Run a training in this process, and save a checkpoint at its end."""
    setting = HOW[how]
    size = max(1, setting.processes)
    module, loader = make(model, seed=0 if resume is None else 1, samples=8 * BATCHES)
    strategy = piper.PiperStrategy(
        setting.program(),
        transport="process" if setting.processes else "local",
        timeout=PATIENCE,
        checkpoint=kind,  # type: ignore[arg-type]
    )
    save = ModelCheckpoint(path.parent, filename=path.stem, save_top_k=-1)
    fit, record = trainer(
        strategy, [save], devices=size, max_steps=steps, max_epochs=-1, enable_checkpointing=True, **options
    )
    batches = Batches(part(batch, setting.replicas, rank * setting.replicas // size) for batch in loader)
    torch.manual_seed(9)
    try:
        fit.fit(module, batches, ckpt_path=None if resume is None else str(resume))
    except piper.PiperError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    again = path.with_name(f"after {path.name}")
    fit.save_checkpoint(again)
    return {"values": values(module), "losses": record.losses, "seed": fit.strategy.phase.fit.seed}  # type: ignore[attr-defined]
