"""Trainings of a model with experts in float64, on one device and divided over four processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_piper as piper
from lightning_piper.directives import Directive
from lightning_piper.testing import Model, Spec, make_batch
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import Batches, sharing_captures, trace, trainer, values

SAMPLES, STEPS, SAVED = 8, 5, 3
SPECS = {
    "rows": Spec(("linear", "experts", "crowded", "linear"), (0, 0, 1, 1)),
    "places": Spec(("linear", "places", "places", "linear"), (0, 0, 1, 1)),
}


def _stages(schedule: list[Directive], groups: list[list[int]], **sharded: bool) -> list[Directive]:
    replicate = piper.Replicate(filter={}, devices=groups, bucket_size=1e-4, **sharded)
    return [*schedule, replicate, piper.ShardExperts(filter={"EP": "*"}, devices=groups)]


def _one_stage(owners: list[list[int]], **sharded: bool) -> list[Directive]:
    return [
        piper.Place(filter={}, devices=[0, 1, 2, 3]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        piper.ShardExperts(filter={"EP": "*"}, devices=owners),
        piper.Replicate(filter={}, devices=[0, 1, 2, 3], bucket_size=1e-4, **sharded),
    ]


STAGES = [[0, 2], [1, 3]]
# Name -> (number of replicas, number of devices over which experts are divided, program).
PROGRAMS: dict[str, tuple[int, int, Callable[[], list[Directive]]]] = {
    "pp2 ep2 zero3": (
        2,
        2,
        lambda: _stages(piper.schedules.one_f_one_b(2, 4, devices=STAGES), STAGES, shard_params=True),
    ),
    "pp2 ep2 zero2": (
        2,
        2,
        lambda: _stages(piper.schedules.zero_bubble(2, 4, devices=STAGES), STAGES, shard_grads=True),
    ),
    "ep4": (4, 4, lambda: _one_stage([[0, 1, 2, 3]])),
    "ep2 dp2": (4, 2, lambda: _one_stage([[0, 1], [2, 3]])),
    "ep2 dp2 zero3": (4, 2, lambda: _one_stage([[0, 2], [3, 1]], shard_params=True)),
}


@dataclass(frozen=True)
class Job:
    """Attributes:
    program: One of `PROGRAMS`; None for one device.
    model: One of `SPECS`.
    save: The kind of checkpoint that is written after three steps.
    resume: The name of the job from whose checkpoint this one resumes.
    """

    name: str
    program: str | None
    model: str = "rows"
    options: dict[str, Any] = field(default_factory=dict)
    save: str = ""
    resume: str = ""


class Held(L.Callback):
    """Records how many elements of the experts' parameters and of their optimizer state a process holds."""

    def __init__(self) -> None:
        self.params = self.state = self.grads = 0

    def on_before_zero_grad(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        owned = trainer.strategy.phase.fit.ownership.owned_params  # type: ignore[attr-defined]
        experts = [x for name, x in owned.items() if name.endswith((".up", ".down"))]
        self.params = sum(x.numel() for x in experts)
        self.grads = max(self.grads, sum(x.grad.numel() for x in experts if x.grad is not None))
        moments = [s for x in experts for key, s in optimizer.state[x].items() if key.startswith("exp_avg")]
        self.state = sum(s.numel() for s in moments)


def checkpoint(folder: Path, name: str) -> Path:
    return folder / f"{name}.ckpt"


@sharing_captures
def fit(job: Job, folder: Path, rank: int = 0) -> dict[str, Any]:
    torch.manual_seed(3)
    module = Model(SPECS[job.model], seed=1 if job.resume else 0)
    replicas, _, program = PROGRAMS[job.program] if job.program else (1, 1, None)
    strategy: Any = "auto"
    if program is not None:
        kind: Any = job.save or "consolidated"
        strategy = piper.PiperStrategy(program(), timeout=PATIENCE, checkpoint=kind)
    held = Held()
    callbacks: list[L.Callback] = [held] if program is not None else []
    if job.save:
        callbacks.append(ModelCheckpoint(folder, filename=job.name, every_n_train_steps=SAVED, save_top_k=-1))
    options = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": bool(job.save), **job.options}
    run, record = trainer(strategy, callbacks, devices=1 if program is None else 4, **options)
    replica = rank * replicas // 4
    first = SAVED if job.resume else 0
    batches = [
        {
            name: x.chunk(replicas)[replica]
            for name, x in make_batch(SPECS[job.model], SAMPLES, seed=i).items()
        }
        for i in range(first, first + 2 * STEPS)
    ]
    try:
        run.fit(module, Batches(batches), ckpt_path=checkpoint(folder, job.resume) if job.resume else None)
    except piper.PiperError as error:
        return {"error": str(error)}
    return {"values": values(module), "losses": torch.stack(record.losses),
            "held": {"params": held.params, "grads": held.grads, "state": held.state}}  # fmt: skip


def trace_all(jobs: Iterable[Job], folder: Path) -> None:
    """Trace the steps of all jobs, whole and with divided experts."""
    degrees = {(PROGRAMS[job.program][1],) * 2 for job in jobs if job.program}
    for name in {job.model for job in jobs}:
        trace(
            Model(SPECS[name]),
            make_batch(SPECS[name], SAMPLES),
            (8, 4, 2, 1),
            "training_step",
            degrees=degrees,
        )


def train(rank: int, jobs: Iterable[Job], folder: Path) -> list[dict[str, Any]]:
    """Run all jobs in this process, one after another."""
    return [fit(job, folder, rank) for job in jobs]
