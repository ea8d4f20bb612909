"""A module with steps of every kind, and helpers that run one as a forward-only plan in one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import capture, flatten
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import Directive, Replicate
from lightning_piper.ir.buckets import packed_params
from lightning_piper.runtime import Executor, LocalTransport, StepResult, run_local

Program = list[Directive]
GROUPS = [[0, 2], [1, 3]]
CPU = torch.device("cpu")


class Steps(L.LightningModule):
    """Two stages in double precision. Batch: (input [n, 4], target [n, 2])."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
            self.second, self.unused = nn.Linear(6, 2), nn.Linear(2, 2)
            self.double()
            self.norm.running_mean.normal_()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = F.dropout(self.norm(self.first(x)), 0.5, self.training)
        with piper.annotate("PP", 1):
            return self.second(hidden.relu())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.log("val_loss", loss)
        self.log("largest", out.max(), reduce_fx="max")
        return {"out": out.t(), "given": [x, None], "number": dataloader_idx, "again": out}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: run no stage, and return and log nothing."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Predict without annotations. The parameters are on the first stage."""
        return torch.tanh(self.first(batch[0]))


def examples(n: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randn(
        n, 2, generator=g, dtype=torch.float64
    )


def replicated(**shards: Any) -> Program:
    """Return a 1F1B program of two stages with two microbatches, each stage replicated on two devices.
    `shards` are fields of `Replicate`."""
    places: Program = [piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(GROUPS)]
    return [*places, *piper.schedules.one_f_one_b(2, 2)[2:], Replicate(filter={}, devices=GROUPS, **shards)]


def forward_of(
    program: Program, step: str, module: L.LightningModule | None = None, fit: bool = False
) -> Compiled:
    """Return a compiled step of `module` (default: a new `Steps`). With `fit`, compile the training step
    first and then the step for its program, as in a fit."""
    module = Steps() if module is None else module
    if not fit:
        return piper.compile(module, examples(), program, step=step)
    training = piper.compile(module.train(), examples(), program)
    return compile_step(
        capture(module.eval(), examples(), name=step), training.program, training=training.dag
    )


def run(compiled: Compiled, module: L.LightningModule, leaves: list[Tensor]) -> list[StepResult]:
    """Return the results of the plans, by device."""
    params = {n: x.detach() for n, x in module.named_parameters()}
    transport = LocalTransport(compiled.plans)
    executors = []
    for plan in compiled.plans.values():
        kept = {}
        for bucket, whole in plan.shards.items():
            flat = packed_params(bucket, params, plan.replica, CPU)
            kept[bucket] = flat if whole else flat.chunk(bucket.members)[bucket.member(plan.replica)].clone()
        buffers = dict(module.named_buffers())
        executors.append(Executor(plan, compiled.step, params, buffers, transport, CPU, kept))
    return run_local(executors, leaves, seed=3)


def eager(module: L.LightningModule, step: str, batch: Any) -> tuple[Any, dict[str, Tensor]]:
    """Run a step in plain PyTorch without gradients. Return its result, and name -> logged value."""
    logged: dict[str, Tensor] = {}
    module.log = lambda name, value, **kwargs: logged.__setitem__(name, value)  # type: ignore[method-assign,assignment]
    try:
        with torch.no_grad():
            return getattr(module, step)(batch, 0), logged
    finally:
        del module.log


def leaves_of(value: Any) -> list[Tensor]:
    return flatten(value)[0]
