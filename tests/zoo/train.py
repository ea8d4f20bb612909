"""Trains kinds of modules at levels: plainly, under DDP, and under this package's strategy. One launch of
processes runs many trainings.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import random
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import lightning_piper as piper
from lightning_piper.errors import PiperError
from tests.distributed.processes import PATIENCE, run_ranks
from tests.strategy.fitting import QUIET, traced_once, values
from tests.zoo import (
    draws,
    models_generative,
    models_loops,
    models_sequences,
    models_text,
    models_vision,
    models_wild,
)
from tests.zoo.kinds import Kind

Outcome = dict[str, Any]
MODULES = [models_vision, models_generative, models_text, models_sequences, models_loops, models_wild]
KINDS: dict[str, Kind] = {kind.name: kind for module in MODULES for kind in module.KINDS}
PROCESSES = 2


def sharded(**levels: bool) -> list[Any]:
    return [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1], **levels)]


# The directives of each level that uses several processes; an empty program is data parallelism.
PROGRAMS: dict[str, list[Any] | None] = {
    "replicate": None,
    "zero1": sharded(shard_optimizer=True),
    "zero2": sharded(shard_grads=True),
    "zero3": sharded(shard_params=True),
    "stages": [piper.Place(filter={"PP": i}, devices=[i]) for i in range(PROCESSES)],
}
ALONE = ["plain", "whole", "one"]  # the levels that use one process
OVER = ["ddp", *PROGRAMS]


def strategy(level: str) -> Any:
    if level in ("plain", "whole"):
        return "auto"
    if level == "ddp":
        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True, timeout=PATIENCE)
    if level == "one":
        return piper.PiperStrategy()
    return piper.PiperStrategy(PROGRAMS[level], timeout=PATIENCE)


class Joined:
    """A batch sampler for one device: each batch joins the batches that Lightning's samplers give to the
    replicas.
    """

    def __init__(self, dataset: Any, size: int, shuffle: bool) -> None:
        self.size, self.sampler = size, self  # Lightning sets the epoch of a loader's sampler
        self.parts = [
            DistributedSampler(dataset, PROCESSES, rank, shuffle=shuffle) for rank in range(PROCESSES)
        ]

    def set_epoch(self, epoch: int) -> None:
        for part in self.parts:
            part.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.parts[0]) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        parts = [list(part) for part in self.parts]
        for at in range(0, len(parts[0]), self.size):
            yield [i for part in parts for i in part[at : at + self.size]]


def loader(made: Any, level: str, shuffle: bool) -> Any:
    if isinstance(made, list):
        return [loader(each, level, shuffle) for each in made]
    if isinstance(made, CombinedLoader):
        return CombinedLoader(
            {k: loader(each, level, shuffle) for k, each in made.iterables.items()}, made._mode
        )
    if level != "whole" or made is None or isinstance(made.dataset, IterableDataset):
        return made
    batches: Any = Joined(made.dataset, made.batch_size, shuffle)
    return DataLoader(made.dataset, batch_sampler=batches, collate_fn=made.collate_fn)


def plain_numbers(x: Any) -> Any:
    """Values that can be written to a file and compared. Tensors are copied."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {k: plain_numbers(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain_numbers(v) for v in x]
    return x


class Watch(L.Callback):
    """Records what each step returns, and what is logged."""

    def __init__(self, seen: Outcome) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.seen["steps"].append(plain_numbers(outputs))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seen["logged"].append(plain_numbers(dict(trainer.callback_metrics)))


def module_of(kind: Kind, level: str) -> L.LightningModule:
    seed(3)
    module = kind.module()
    if level == "stages":
        found = list(units("", module))
        if len(found) < PROCESSES:
            raise OneModule(found)
        stages = [found[: len(found) // 2], found[len(found) // 2 :]]
        piper.annotate_modules(module, "PP", [[*map(glob.escape, names)] for names in stages])
        cls = type(module)
        steps = ("training_step", "validation_step", "predict_step")
        own = {
            name: last_stage(getattr(cls, name))
            for name in steps
            if getattr(cls, name) is not getattr(L.LightningModule, name)
        }
        module.__class__ = type(cls.__name__, (cls,), {**own, "__module__": cls.__module__})
    return module


class OneModule(PiperError):
    """The module does not have two submodules of which stages could be made."""


def last_stage(step: Any) -> Any:
    """Wrap a step so that work outside of annotated modules belongs to the last stage."""

    @functools.wraps(step)
    def annotated(self: Any, *args: Any, **kwargs: Any) -> Any:
        with piper.annotate("PP", PROCESSES - 1):
            return step(self, *args, **kwargs)

    return annotated


def units(name: str, module: nn.Module) -> Iterator[str]:
    """The names of the modules that have parameters and are no containers of torch, in the order in which
    they are registered.
    """
    if not name or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        for key, child in module.named_children():
            yield from units(f"{name}.{key}" if name else key, child)
    elif any(True for _ in module.parameters()):
        yield name


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def work(kind: Kind, level: str, folder: Path) -> Outcome:
    """Fit for two epochs, validate and predict. Then train another module for the second epoch, from the
    checkpoint of the first one.
    """
    seen: Outcome = {"steps": [], "logged": []}

    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)

    def trainer(*callbacks: L.Callback) -> L.Trainer:
        devices = PROCESSES if level in OVER else 1
        options: dict[str, Any] = {
            **QUIET,
            "accelerator": "cpu",
            "precision": "64-true",
            "devices": devices,
            **kind.options,
        }
        options["enable_checkpointing"] = bool(callbacks)
        seed(9)
        return L.Trainer(
            strategy=strategy(level), callbacks=[Watch(seen), *callbacks], max_epochs=2, **options
        )

    module, fit = module_of(kind, level), trainer(save)
    data = [loader(kind.train(), level, True)] + (
        [loader(kind.val(), level, False)] if kind.val is not None else []
    )
    fit.fit(module, *data)
    seen["first"] = values(module)
    if kind.val is not None:
        seen["validated"] = [dict(x) for x in fit.validate(module, data[1], verbose=False)]
    if kind.predict:
        seen["predicted"] = plain_numbers(fit.predict(module, kind.val()))  # type: ignore[misc]
    module = module_of(kind, level)
    trainer().fit(module, *data, ckpt_path=str(folder / "epoch=0.ckpt"))
    return {**seen, "values": values(module)}


@contextlib.contextmanager
def noted(found: Outcome) -> Iterator[None]:
    """Record the package's warnings in `found`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found["warned"] = sorted({str(w.message) for w in caught if "lightning_piper" in w.filename})


def train(kind: Kind, level: str, folder: Path, rank: int = 0) -> Outcome:
    """Everything that a training of a kind shows: steps, logged values, predictions, parameters and warnings,
    or its error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, begun = Outcome(), time.monotonic()
    # Only one process traces the steps again to see whether they have changed, because a step reads the same
    # state at all levels.
    run = work if level in ("one", "stages") and rank == 0 else traced_once(work)
    with noted(found), draws.fixed(), torch.random.fork_rng():
        try:
            found |= run(kind, level, folder)
        except Exception as error:
            traceback.print_exc()
            found |= {"error": f"{type(error).__name__}: {error}", "known": isinstance(error, PiperError)}
    found["seconds"] = time.monotonic() - begun
    return found


def train_all(rank: int, cases: Sequence[tuple[str, str]], folder: Path) -> dict[tuple[str, str], Outcome]:
    """Train kinds at levels in this process. The result of each is written to a file at once."""
    torch.set_num_threads(1)
    found = {}
    for name, level in cases:
        found[name, level] = train(KINDS[name], level, folder / f"{name}-{level}", rank)
        torch.save(found[name, level], folder / f"{name}-{level}" / f"{rank}.pt")
    return found


def ended(said: str, written: Sequence[Outcome | None]) -> Outcome:
    """The outcome of a process that ended before it wrote its own: the error of the process that failed first, if
    `said`, the output of this process, names it.

    Args:
        written: The outcomes that the processes have written, by rank; None if a process wrote none.
    """
    first = re.search(r"ends, because .*the first process to fail was rank (\d+)", said)
    other = None if first is None else written[int(first[1])]
    return {"error": f"the process ended: {said[-2000:]}"} if other is None or "error" not in other else other


def outcomes(cases: Sequence[tuple[str, str]], folder: Path) -> dict[tuple[str, str], list[Outcome]]:
    """For each case, what every process has seen. If a case ends the processes, new ones run the remaining
    cases.
    """
    found = {case: [train_all(0, [case], folder)[case]] for case in cases if case[1] in ALONE}
    over = [case for case in cases if case[1] in OVER]
    while over:
        ends = run_ranks(
            PROCESSES, train_all, folder, over, folder, joined=False, limit=timedelta(seconds=800)
        )
        for name, level in over:
            files = [folder / f"{name}-{level}" / f"{rank}.pt" for rank in range(PROCESSES)]
            written = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
            found[name, level] = [
                ended(end.said, written) if each is None else each
                for each, end in zip(written, ends, strict=True)
            ]
            if not all(file.exists() for file in files):
                break
        over = [case for case in over if case not in found]
    return found
