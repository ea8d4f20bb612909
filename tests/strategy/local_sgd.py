"""Trainings with local SGD on processes, and the same algorithm in plain PyTorch in one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

import lightning_piper as piper
from lightning_piper.session.local_sgd import LocalSGD, Rounds
from lightning_piper.strategy.saving import SavingStrategy
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET, Batches, Counted, sharing_captures, traced_once

APART = ("mask",)  # infinite values have no distance
CALLS = ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "barrier")
BATCH = 8  # samples of all replicas together
MASK = torch.tensor([0.0, -torch.inf, 0.1])
AVERAGE = {"lr": 1.0, "momentum": 0.0}
CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


class Net(L.LightningModule):
    """Two stages."""

    def __init__(
        self,
        optimizer: str = "adamw",
        norm: bool = False,
        dropout: float = 0.0,
        manual: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), *([nn.BatchNorm1d(9)] if norm else []), nn.Tanh())
        self.second = nn.Sequential(nn.Dropout(dropout), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("mask", MASK.clone())
        self.second[1].bias.requires_grad_(False)
        self.optimizer, self.metric = optimizer, MeanMetric()
        self.automatic_optimization = not manual

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = self.first(x)
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(hidden), y)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("own", loss)
        self.log("mean", loss, sync_dist=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        loss = self.loss(*batch)
        self.log("val_loss", loss)
        self.metric(loss)
        self.log("metric", self.metric)

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = (
            torch.optim.SGD(params, lr=0.2) if self.optimizer == "sgd" else torch.optim.AdamW(params, lr=0.05)
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Silent(Net):
    """Logs nothing."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        settings: Local SGD; None without it.
        batches: Number of batches.
        degrees: The program of a replica, as parallel degrees.
        net: Class of the module.
        model, options: Arguments of the module and of the Trainer.
        strategy: Other arguments of the strategy.
        save: The step after which a checkpoint is written.
        resume: Name of the job whose checkpoint the training resumes from.
        fewer: How many batches fewer the last process has. None: the number of batches is known in advance.
        change: Whether the module changes between the fit and the save after it.
        bug: Name of a fault of `BUGS` that the training has.
        loader: Whether the batches come from a loader, which a training can resume in the middle of an epoch.
        alike: Whether all replicas have the same samples.
        frozen: Name of a parameter that only the last process freezes.
        wider: Whether the last process has a buffer with another shape.
    """

    name: str
    settings: LocalSGD | None
    batches: int = 7
    degrees: dict[str, int] = field(default_factory=dict)
    net: type[Net] = Net
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    save: int = 0
    resume: str = ""
    fewer: int | None = None
    change: bool = False
    bug: str = ""
    loader: bool = False
    alike: bool = False
    frozen: str = ""
    wider: bool = False


def local(replicas: int = 2, every: int = 3, **options: Any) -> LocalSGD:
    return LocalSGD(replicas=replicas, every=every, **options)


def samples(batches: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    count = batches * BATCH
    return tuple(torch.randn(count, width, generator=draw, dtype=torch.float64) for width in (6, 3))  # type: ignore[return-value]


def batches_of(job: Job, part: int, parts: int) -> list[list[Tensor]]:
    """The batches of one of several equal parts of the processes."""
    x, y = samples(job.batches)
    if job.loader:
        size = BATCH // parts
        return [[a, b] for a, b in zip(x[part::parts].split(size), y[part::parts].split(size), strict=True)]
    if job.alike:
        part = 0
    return [
        [whole.chunk(parts)[part] for whole in (a, b)]
        for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True)
    ]


def made(job: Job) -> Net:
    torch.manual_seed(5)
    return job.net(**job.model).double()  # Lightning loads a checkpoint before it converts a module


@torch.no_grad()
def changed(module: Net) -> None:
    module.first[0].weight.add_(1.0)


# Faults

MEAN = "a save after the end has only the mean"


def _without_exchange(rounds: Rounds, epoch: int, batch: int) -> None:
    rounds.steps += 1


_changes, _load, _after, _due = Rounds._changes, Rounds._load, Rounds.after_update, LocalSGD.is_due
_end = Rounds.end


def _scaled(factor: float) -> Callable[..., Iterator[Any]]:
    def changes(rounds: Rounds, pairs: Any, constants: bool = False) -> Iterator[Any]:
        for anchor, value, change in _changes(rounds, pairs, constants):
            yield anchor, value, change * factor

    return changes


def _keeping_anchor(rounds: Rounds, epoch: int, batch: int) -> None:
    before = {name: x.clone() for name, x in rounds._anchors.items()}
    _after(rounds, epoch, batch)
    for name, x in before.items():
        rounds._anchors[name].copy_(x)


def _without_momentum(rounds: Rounds, state: Any) -> None:
    _load(rounds, {**state, "momentum": {}})


def _with_values(rounds: Rounds, state: Any) -> None:
    """The anchor of the checkpoint is not loaded: the parameters become the anchor."""
    anchors = {**rounds._anchors, **rounds._buffers}
    _load(rounds, {**state, "anchor": rounds._ownership.assembled(anchors)})


def _mean_only(rounds: Rounds) -> None:
    _end(rounds)
    rounds.ended_within, rounds.steps = False, 0


def _late(settings: LocalSGD, part: int, steps: int) -> bool:
    return steps > 1 and _due(settings, part, steps - 1)


BUGS: dict[str, tuple[Any, str, Any]] = {
    "no exchange": (Rounds, "after_update", _without_exchange),
    "the sign of the change": (Rounds, "_changes", _scaled(-1.0)),
    "another number of replicas": (Rounds, "_changes", _scaled(2 / 3)),
    "the anchor stays": (Rounds, "after_update", _keeping_anchor),
    "an exchange a step late": (LocalSGD, "is_due", _late),
    "no momentum in the checkpoint": (Rounds, "_load", _without_momentum),
    MEAN: (Rounds, "end", _mean_only),
    "no anchor in the checkpoint": (Rounds, "_load", _with_values),
    "all replicas resume as replica 0": (
        SavingStrategy,
        "_take_local_replica",
        lambda strategy, content: None,
    ),
}


# On processes


class Seen(L.Callback):
    """Records the logged values and the parameters after each batch."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.params: list[Tensor] = []
        self.end: dict[str, float] = {}
        self.calls: list[int] = []  # of functions that communicate, after each batch
        self._count = 0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._count += 1
            return function(*args, **options)

        return call

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        found = trainer.callback_metrics
        self.logged.append({name: float(found[name]) for name in ("own", "mean") if name in found})
        own: Any = trainer.strategy.phase.fit.ownership.owned_params  # type: ignore[attr-defined]
        self.params.append(torch.cat([p.detach().flatten() for p in own.values()]))
        self.calls.append(self._count)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.end = {name: float(x) for name, x in trainer.callback_metrics.items()}


def fit(job: Job, rank: int, size: int, folder: Path) -> dict[str, Any]:
    module = made(job)
    if job.settings is not None and rank >= size // job.settings.replicas and not job.resume:
        changed(module)  # only the values of replica 0 count
    strategy = piper.PiperStrategy(local_sgd=job.settings, timeout=PATIENCE, **job.degrees, **job.strategy)  # type: ignore[arg-type]
    shared = job.degrees.get("pp", 1)  # processes that work on one batch
    if job.loader:
        x, y = samples(job.batches)
        parts, data = size // shared, TensorDataset(x, y)
        sampler = DistributedSampler(data, parts, rank // shared, shuffle=False)
        train: Any = DataLoader(data, BATCH // parts, sampler=sampler)
    else:
        own = batches_of(job, rank // shared, size // shared)
        last = job.fewer if job.fewer is not None and rank == size - 1 else 0
        train = (Counted if job.fewer is None else Batches)(own[: len(own) - last])
    seen, callbacks = Seen(), []
    if job.wider:
        module.register_buffer("scales", torch.ones(4 + (rank == size - 1)))
    if job.frozen and rank == size - 1:  # the optimizer has the parameter already
        callbacks.append(
            LambdaCallback(
                on_train_start=lambda _, module: module.get_parameter(job.frozen).requires_grad_(False)
            )
        )
    if job.save:
        callbacks.append(ModelCheckpoint(folder, job.name, every_n_train_steps=job.save, save_top_k=-1))
    options = {"max_epochs": 1, "precision": "64-true", "num_sanity_val_steps": 0, **job.options}
    options |= {**QUIET, "enable_checkpointing": bool(job.save), "default_root_dir": folder / "root"}
    trainer = L.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, callbacks=[seen, *callbacks], **options
    )
    file = str(folder / f"{job.resume}.ckpt") if job.resume else None
    with contextlib.ExitStack() as changes:
        if job.bug:
            changes.enter_context(mock.patch.object(*BUGS[job.bug]))
        for name in CALLS:
            changes.enter_context(mock.patch.object(dist, name, seen.counted(getattr(dist, name))))
        trainer.fit(module, train, train, ckpt_path=file)
    after: Any = None
    if job.save:
        trainer.save_checkpoint(folder / f"{job.name}, end.ckpt")
        (after,) = trainer.validate(module, train, verbose=False)
        if job.change:
            changed(module)
        trainer.save_checkpoint(folder / f"{job.name}, validated.ckpt")
    values = {name: x.detach().clone() for name, x in module.state_dict().items() if name not in APART}
    drawn = strategy.distributed_sampler_kwargs
    return {
        "values": values,
        "drawn": drawn,
        "mask": module.mask.clone(),
        "logged": seen.logged,
        "params": seen.params,
        "calls": seen.calls,
        "end": seen.end,
        "after": after,
    }


@traced_once
@sharing_captures
def train(rank: int, size: int, jobs: Sequence[Job], folder: Path) -> dict[str, Any]:
    """Run the trainings on this process. A job may end with an error on all processes."""
    found = {}
    for job in jobs:
        try:
            found[job.name] = fit(job, rank, size, folder)
        except piper.PiperError as error:
            found[job.name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def save_models(rank: int, folder: Path) -> dict[str, Any]:
    """Train a model of transformers in local replicas of two stages, and save it after each batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Saved(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            config = GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0)
            self.model = GPT2LMHeadModel(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch, labels=batch, use_cache=False).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            piper.save_pretrained(self.trainer, folder / str(batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = piper.PiperStrategy(pp=2, dp=1, microbatches=2, local_sgd=local(every=2), timeout=PATIENCE)
    trainer = L.Trainer(**QUIET, accelerator="cpu", devices=4, strategy=strategy, max_epochs=1)
    tokens = torch.randint(16, (3, 4, 6), generator=torch.Generator().manual_seed(rank // 2))
    module = Saved()
    trainer.fit(module, Counted(list(tokens)))
    piper.save_pretrained(trainer, folder / "end")
    return {name: x.detach().clone() for name, x in module.model.state_dict().items()}


def follow(rank: int, before: str, codes: Sequence[str]) -> dict[str, Any]:
    """Run the blocks of a page on this process, which is one of those that the blocks name."""
    made: dict[str, Any] = {}

    def quiet(**options: Any) -> L.Trainer:
        own = L.pytorch.Trainer(**{**QUIET, "max_epochs": 1, **options, "accelerator": "cpu"})
        made["steps"] = made.get("steps", 0) + 1
        return own

    exec(before, made)
    with mock.patch.object(L, "Trainer", quiet):
        for code in codes:
            exec(code, made)
    values = {name: x.detach().clone() for name, x in made["module"].state_dict().items()}
    return {"fits": made["steps"], "values": values}


# In plain PyTorch


class Reference:
    """Local SGD on copies of the module."""

    def __init__(self, job: Job) -> None:
        assert job.settings is not None
        self.job, self.settings, first = job, job.settings, made(job)
        self.modules = [copy.deepcopy(first) for _ in range(job.settings.replicas)]
        made_now = [module.configure_optimizers() for module in self.modules]
        self.optimizers = [found["optimizer"] for found in made_now]
        self.schedulers = [found["lr_scheduler"]["scheduler"] for found in made_now]
        self.names = [name for name, p in first.named_parameters() if p.requires_grad]
        self.anchor = {name: first.get_parameter(name).detach().clone() for name in self.names}
        self.outer = torch.optim.SGD(
            list(self.anchor.values()),
            lr=job.settings.lr,
            momentum=job.settings.momentum,
            nesterov=job.settings.nesterov and job.settings.momentum > 0,
        )
        self.losses: list[list[float]] = []
        self.params: list[list[Tensor]] = []
        self.accumulated = job.options.get("accumulate_grad_batches", 1)

    @torch.no_grad()
    def exchange(self, names: Sequence[str], outer: bool = True) -> None:
        for name in names:
            change = torch.stack([self.anchor[name] - m.get_parameter(name) for m in self.modules]).mean(0)
            if outer:
                self.anchor[name].grad = change
            else:
                self.anchor[name] -= change
        self.outer.step()
        self.outer.zero_grad()
        for module in self.modules:
            for name in names:
                module.get_parameter(name).copy_(self.anchor[name])

    @torch.no_grad()
    def average_buffers(self) -> None:
        for name, buffer in self.modules[0].named_buffers():
            if buffer.is_floating_point() and name != "mask":
                mean = torch.stack([module.get_buffer(name) for module in self.modules]).mean(0)
                for module in self.modules:
                    module.get_buffer(name).copy_(mean)

    def update(self, number: int, batches: Sequence[Sequence[list[Tensor]]]) -> None:
        """Update number `number` of each replica, with its batches of an accumulation."""
        of_replicas = []
        for module, optimizer, scheduler, own in zip(
            self.modules, self.optimizers, self.schedulers, batches, strict=True
        ):
            optimizer.zero_grad()
            losses = [module.loss(*batch) for batch in own]
            for loss in losses:
                (loss / self.accumulated).backward()
            if (clip := self.job.options.get("gradient_clip_val")) is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            scheduler.step()
            of_replicas.append(float(losses[-1]))
        self.losses.append(of_replicas)
        self.finish(number)
        self.params.append([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in self.modules])

    def finish(self, number: int) -> None:
        if number % self.settings.every == 0:
            self.exchange(self.names)
            self.average_buffers()

    def drawn(self, replica: int) -> list[list[Tensor]]:
        """The batches of a local replica, whose devices may draw parts of them."""
        parts = self.job.degrees.get("dp", 1)
        drawn = [
            batches_of(self.job, replica * parts + part, self.settings.replicas * parts)
            for part in range(parts)
        ]
        return [[torch.cat(x) for x in zip(*batches, strict=True)] for batches in zip(*drawn, strict=True)]

    def run(self, epochs: int = 1) -> dict[str, Tensor]:
        of_replicas = [self.drawn(replica) for replica in range(self.settings.replicas)]
        step = self.accumulated
        groups = [range(i, min(i + step, self.job.batches)) for i in range(0, self.job.batches, step)]
        for number, group in enumerate(groups * epochs, 1):
            self.update(number, [[own[i] for i in group] for own in of_replicas])
        self.end(len(groups) * epochs)
        return self.values_of_replica_0()

    def stopped(self, steps: int, change: Callable[[Net], None]) -> dict[str, Tensor]:
        """Train until the end of the batches. After some updates, end a fit, and let `change` change the module.
        A new round then begins."""
        batches = list(zip(*(self.drawn(replica) for replica in range(self.settings.replicas)), strict=True))
        for number, own in enumerate(batches[:steps], 1):
            self.update(number, [[batch] for batch in own])
        self.end(steps)
        with torch.no_grad():
            for module in self.modules:
                change(module)
            for name, anchor in self.anchor.items():
                anchor.copy_(self.modules[0].get_parameter(name))
        for number, own in enumerate(batches[steps:], 1):
            self.update(number, [[batch] for batch in own])
        self.end(len(batches) - steps)
        return self.values_of_replica_0()

    def values_of_replica_0(self) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in self.modules[0].state_dict().items() if name not in APART}

    def end(self, steps: int) -> None:
        if steps % self.settings.every:
            self.exchange(self.names, outer=False)
            self.average_buffers()


class Streaming(Reference):
    """With two parts, which `halves` names."""

    halves: tuple[list[str], list[str]] = ([], [])

    def finish(self, number: int) -> None:
        for part, names in enumerate(self.halves):
            if (number + part * self.settings.every // 2) % self.settings.every == 0:
                self.exchange(names)

    def end(self, steps: int) -> None:
        for part, names in enumerate(self.halves):
            if (steps + part * self.settings.every // 2) % self.settings.every:
                self.exchange(names, outer=False)


def reference(job: Job, kind: type[Reference] = Reference) -> Reference:
    found = kind(dataclasses.replace(job, save=0, resume=""))
    found.values = found.run()  # type: ignore[attr-defined]
    return found
