"""Trainings with sharded optimizers, gradients and parameters on two processes (DP2) or four (PP2 x DP2, or two
groups of two replicas), and the same trainings with all devices in one process or on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import lightning_piper as piper
from lightning_piper.directives import Directive, Replicate
from lightning_piper.holdings.tensor_map import LocalShard
from lightning_piper.runtime.process import ProcessEndpoint
from lightning_piper.strategy import fit as fit_module
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import Batches, sharing_captures, trainer, values
from tests.strategy.models import make
from tests.strategy.optimizers import Clipping, Lamb, MuonAndAdamW

LEVELS = {0: {}, 1: {"shard_optimizer": True}, 2: {"shard_grads": True}, 3: {"shard_params": True}}
GROUPS = [[0, 2], [1, 3]]


def dp2(level: int, bucket_size: float = 0.0005, **options: Any) -> list[Directive]:
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        Replicate(filter={}, devices=[0, 1], bucket_size=bucket_size, **LEVELS[level], **options),
    ]


def dp4(level: int, **options: Any) -> list[Directive]:
    return [
        piper.Place(filter={}, devices=[0, 1, 2, 3]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        Replicate(filter={}, bucket_size=0.0005, zero=level, **options),
    ]


def pp2_dp2(first: int, second: int, **options: Any) -> list[Directive]:
    places: list[Directive] = [
        piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(GROUPS)
    ]
    replicas: list[Directive] = [
        Replicate(filter={"PP": stage}, devices=GROUPS[stage], bucket_size=0.0005, **LEVELS[level], **options)
        for stage, level in enumerate((first, second))
    ]
    return [*places, *piper.schedules.one_f_one_b(stages=2, microbatches=2)[2:], *replicas]


PROGRAMS: dict[str, Callable[[], list[Directive]]] = {
    **{f"dp2 zero{level}": lambda level=level: dp2(level) for level in LEVELS},
    **{f"pp2 dp2 zero{level}": lambda level=level: pp2_dp2(level, level) for level in (2, 3)},
    "pp2 dp2 zero3, zero1": lambda: pp2_dp2(3, 1),
    "pp2 dp2 zero1, zero2": lambda: pp2_dp2(1, 2),
    **{
        f"dp2 zero{level} by parameter": lambda level=level: dp2(level, 0.02, shard_by="parameter")
        for level in (1, 3)
    },
    **{f"dp2x2 zero{level}": lambda level=level: dp4(level, shard_size=2) for level in (1, 2, 3)},
    "dp4 zero3": lambda: dp4(3),
    "dp4 zero1 by parameter": lambda: dp4(1, shard_by="parameter"),
    "pp2 dp2 zero1 by parameter": lambda: pp2_dp2(1, 1, shard_by="parameter"),
    "dp2x2 zero1 by parameter": lambda: dp4(1, shard_size=2, shard_by="parameter"),
    **{
        f"dp2 zero{level} overlapped": lambda level=level: dp2(
            level, 0.002, shard_by="parameter", overlap_update=True
        )
        for level in (1, 2, 3)
    },
    "dp4 zero1 overlapped": lambda: dp4(1, shard_by="parameter", overlap_update=True),
    "pp2 dp2 zero1 overlapped": lambda: pp2_dp2(1, 1, shard_by="parameter", overlap_update=True),
    "dp2x2 zero1 overlapped": lambda: dp4(1, shard_size=2, shard_by="parameter", overlap_update=True),
    "dp2 zero0 in float32": lambda: dp2(0, reduce_dtype="float32"),
    "dp2 zero2 in float32": lambda: dp2(2, reduce_dtype="float32"),
    **{
        f"dp2 zero{level}, gathers in bfloat16": lambda level=level: dp2(level, gather_dtype="bfloat16")
        for level in (1, 3)
    },
}
PROCESSES = {name: 2 if name.startswith("dp2 ") else 4 for name in PROGRAMS}


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        samples: The number of samples, which come in batches of 8.
        options: The options of the Trainer.
        change: A function that changes the module before the training.
        resume, save: The file to resume from; whether a checkpoint is written every five steps.
        scaled: precision 16-mixed, with one gradient that overflows, on rank 1 alone.
        reload: Half of the initial values are loaded after the third step.
        alone: Each rank decides by itself whether gradients have overflowed.
    """

    name: str
    program: str
    model: str = "varied"
    samples: int = 40
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None
    resume: str = ""
    save: bool = False
    scaled: bool = False
    alone: bool = False
    reload: bool = False


def with_sgd(module: Any) -> None:
    """An optimizer to which the scale of the gradients matters."""
    optimizer = torch.optim.SGD
    module.configure_optimizers = lambda: optimizer(module.named_parameters(), lr=0.3, momentum=0.9)


def with_adagrad(module: Any) -> None:
    """Has state from its construction on."""
    module.configure_optimizers = lambda: torch.optim.Adagrad(
        module.parameters(), lr=0.05, initial_accumulator_value=0.3
    )


def with_fused(module: Any) -> None:
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def with_lamb(module: Any) -> None:
    module.configure_optimizers = lambda: Lamb(module.parameters())


def with_adafactor(module: Any) -> None:
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())


def with_muon(module: Any) -> None:
    for p in module.parameters():
        p.requires_grad_(p.ndim == 2)
    module.configure_optimizers = lambda: torch.optim.Muon(
        [p for p in module.parameters() if p.requires_grad], lr=0.02
    )


def with_muon_and_adamw(module: Any) -> None:
    """One optimizer with a group for each: Muon for the matrices except the embedding, AdamW for the others."""
    matrices, others = [], []
    for p in module.parameters():
        if p.requires_grad:
            (matrices if p.ndim == 2 and p is not module.embedding.weight else others).append(p)
    module.configure_optimizers = lambda: MuonAndAdamW(
        [{"params": matrices, "matrices": True}, {"params": others}], lr=0.02
    )


def with_clipping(module: Any) -> None:
    module.configure_optimizers = lambda: Clipping(module.parameters())


def with_lbfgs(module: Any) -> None:
    module.configure_optimizers = lambda: torch.optim.LBFGS(
        [p for p in module.parameters() if p.requires_grad], lr=0.1
    )


def with_rounded_parameters(module: Any, frozen: bool) -> None:
    """On one device: the step computes with parameters rounded to bfloat16, and the optimizer updates unrounded ones.
    With `frozen`, also parameters that are not trained are rounded, which only ZeRO-3 shards."""
    whole: dict[str, Tensor] = {}

    def begin(*args: Any) -> None:
        for name, p in module.named_parameters():
            whole[name] = p.detach().clone()
            if frozen or p.requires_grad:
                p.data.copy_(p.bfloat16())

    def end(*args: Any) -> None:
        for name, p in module.named_parameters():
            p.data.copy_(whole[name])

    module.on_train_batch_start, module.on_before_optimizer_step = begin, end


def with_hook(module: Any) -> None:
    module.inner.weight.register_hook(lambda grad: grad * 2)


def with_hook_and_sgd(module: Any) -> None:
    with_hook(module)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.03)


class Holdings(L.Callback):
    """Records what the process holds between two steps."""

    def __init__(self, counts: list[int]) -> None:
        self.bytes, self.groups, self.sums, self._counts = 0, [], [], counts
        self.local_shards: list[LocalShard] = []
        self.once: dict[tuple[str, str], Any] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        fit: Any = trainer.strategy.phase.fit  # type: ignore[attr-defined]
        found = [*fit.ownership.local_shards(), *fit.optimizer.local_shards()]
        self.local_shards = [
            dataclasses.replace(shard, tensor=shard.tensor.detach().clone()) for shard in found
        ]
        self.once = fit.optimizer.once()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.sums.append(self._counts[0])
        fit: Any = trainer.strategy.phase.fit  # type: ignore[attr-defined]
        (optimizer,) = trainer.optimizers
        held = [x for shards in fit.ownership.shards.values() for x in shards.values()]
        held += [x for x in module.parameters() if not x.is_meta]
        held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        self.bytes = sum(
            {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values()
        )
        self.groups = [
            [(tuple(p.shape), p.__dict__.get("decays")) for p in group["params"]]
            for group in optimizer.param_groups
        ]


class Overflow(L.Callback):
    """A gradient of the third batch overflows, on one of several processes."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 2 and int(os.environ.get("LOCAL_RANK", 1)) == 1:
            params = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            next(p.grad for p in params if p.grad is not None).fill_(float("inf"))  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


class Reload(L.Callback):
    """Reloads values as the learning-rate finder does."""

    def __init__(self, initial: dict[str, Tensor]) -> None:
        self.initial = initial

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.strategy.load_model_state_dict(
                {"state_dict": {name: x / 2 for name, x in self.initial.items()}}
            )


class Alone:
    """Replaces `LossScaling`: it scales, but the processes do not agree on overflows."""

    def __init__(self, plugin: Any, *args: Any) -> None:
        self._scaler = plugin.scaler

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())

    def remove(self) -> None:
        pass


@contextlib.contextmanager
def counting_sums() -> Iterator[list[int]]:
    """How many buckets of gradients this process has summed with others so far, in a list of one number."""
    counts, bind = [0], ProcessEndpoint.collective

    def counted(self: Any, instruction: Any, *args: Any) -> Any:
        bound = bind(self, instruction, *args)
        if not instruction.sums or instruction.bucket is None:
            return bound

        def run() -> object:
            counts[0] += 1
            return bound()

        return run

    with mock.patch.object(ProcessEndpoint, "collective", counted):
        yield counts


@sharing_captures
def fit(
    job: Job, folder: Path, transport: str | None, share: Callable[[Any], Any] = lambda batch: batch
) -> dict[str, Any]:
    """Train. If `transport` is None, train on one device without directives."""
    with (
        counting_sums() as counts,
        mock.patch.object(fit_module, "LossScaling", Alone if job.alone else fit_module.LossScaling),
    ):
        return _fit(job, folder, transport, share, counts)


def _fit(
    job: Job, folder: Path, transport: str | None, share: Callable[[Any], Any], counts: list[int]
) -> dict[str, Any]:
    module, loader = make(job.model, seed=1 if job.resume else 0, samples=job.samples)
    if job.change is not None:
        job.change(module)
    holdings, overflow = Holdings(counts), Overflow()
    callbacks: list[Any] = [] if transport is None else [holdings]
    if job.save:
        callbacks.append(
            ModelCheckpoint(
                folder, filename=f"{job.name}, {transport}, {{step}}", every_n_train_steps=5, save_top_k=-1
            )
        )
    if job.reload:
        callbacks.append(Reload(values(module)))
    strategy: Any = "auto"
    if transport is not None:
        strategy = piper.PiperStrategy(PROGRAMS[job.program](), transport=transport, timeout=PATIENCE)  # type: ignore[arg-type]
    options: dict[str, Any] = {**job.options}
    if job.scaled:
        callbacks.append(overflow)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    devices = PROCESSES[job.program] if transport == "process" else 1
    options = {"devices": devices, "enable_checkpointing": job.save, **options}
    run, record = trainer(strategy, callbacks, **options)
    batches = [share(batch) for batch in loader]
    try:
        run.fit(module, Batches(batches), ckpt_path=str(folder / job.resume) if job.resume else None)
    except piper.PiperError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    optimizer: Any = run.strategy.optimizer_state(run.optimizers[0]) if transport != "process" else None
    return {
        "values": values(module),
        "losses": record.losses,
        "held": holdings.bytes,
        "groups": holdings.groups,
        "optimizer": optimizer,
        "sums": holdings.sums,
        "scales": overflow.scales,
        "pieces": holdings.local_shards,
        "once": holdings.once,
    }


def train(rank: int, jobs: Iterable[Job], folder: Path) -> list[dict[str, Any]]:
    """Run all jobs in this process, one after another."""
    return [fit(job, folder, "process", functools.partial(_own, job.program, rank)) for job in jobs]


def _own(program: str, rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The samples of a rank's replica."""
    replicas = 2 if program.startswith(("dp2 ", "pp2 ")) else 4
    return {name: x.chunk(replicas)[rank * replicas // PROCESSES[program]] for name, x in batch.items()}
