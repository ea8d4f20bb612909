"""Trainings with callbacks that average the weights, on one device with plain Lightning, and on two processes
in stages, as replicas, and with shards. All of them use the same batches, so that their results can be
compared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import PROGRAM, QUIET, sharing_captures, trace, values
from tests.strategy.models import MLP, vectors


def replicas(**options: Any) -> list[Any]:
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], bucket_size=0.0005, **options),
    ]


PROGRAMS: dict[str, list[Any]] = {
    "PP2": list(PROGRAM),
    "DP2": replicas(),
    "ZeRO-1": replicas(shard_optimizer=True),
    "ZeRO-2": replicas(shard_grads=True),
    "ZeRO-3": replicas(shard_params=True),
    "ZeRO-3 by parameter": replicas(shard_params=True, shard_by="parameter"),
}
Seen = dict[str, Any]


class Net(MLP):
    """A model with a validation step, and with a buffer that only the average changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.arange(4.0))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with piper.annotate("PP"):
            hidden = self.first(batch[0])
        with piper.annotate("PP"):
            self.log("mean", (self.second(hidden) * self.offset).mean())

    def val_dataloader(self) -> Any:
        return vectors(seed=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


class Validations(L.Callback):
    """Records the results of each validation."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.found.append(float(trainer.callback_metrics["mean"]))


class Run:
    """How a trial trains: its program (None: plain Lightning) and its folder."""

    def __init__(self, program: str | None, folder: Path, local: bool = False) -> None:
        self.program, self.folder, self.local = program, folder, local

    def fit(self, callbacks: Any, module: Any = None, resume: Any = None, checkpoint: str = "consolidated",
        double: bool = False, **options: Any) -> L.Trainer:  # fmt: skip
        if module is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                module = Net()
        if double:  # otherwise the average has the dtype that the module has before the Trainer converts it
            module.double()
        strategy: Any = "auto"
        if self.program is not None:
            transport = "local" if self.local else "process"
            strategy = piper.PiperStrategy(
                PROGRAMS[self.program],
                timeout=PATIENCE,
                checkpoint=checkpoint,
                transport=transport,  # type: ignore[arg-type]
            )
        processes = 1 if self.program is None or self.local else 2
        trainer = L.Trainer(
            **{
                **QUIET,
                "strategy": strategy,
                "accelerator": "cpu",
                "devices": processes,
                "precision": "64-true",
                "max_epochs": 2,
                "use_distributed_sampler": False,
                "default_root_dir": self.folder,
                "callbacks": callbacks,
                **options,
            }
        )
        trainer.fit(module, vectors(), ckpt_path=resume)
        return trainer


def saved(path: Path) -> Seen:
    content = torch.load(path, weights_only=False)
    found = {
        key: content[key]
        for key in ("state_dict", "current_model_state", "averaging_state")
        if key in content
    }
    return {
        **found,
        "callbacks": {k.split("{")[0]: v for k, v in content["callbacks"].items() if "Averaging" in k},
    }


def whole_run(run: Run, make: Callable[[], L.Callback], kind: str = "consolidated", **options: Any) -> Seen:
    """Fit with checkpoints, then resume from a checkpoint at the end of an epoch. (In the middle
    of an epoch, a plain Trainer begins the epoch again.)
    """
    folder = run.folder / f"{make.__name__} {kind}"
    at, seen = Validations(), {}
    keep = cb.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    last = make()
    trainer = run.fit([at, last, keep], checkpoint=kind, enable_checkpointing=True, **options)
    seen |= {"values": values(trainer.lightning_module), "validations": at.found}
    again = Validations()
    resumed = run.fit([again, make()], resume=folder / "step=5.ckpt", checkpoint=kind, **options)
    seen |= {"resumed": values(resumed.lightning_module), "validations again": again.found}
    trainer.save_checkpoint(folder / "end.ckpt")
    for name in ("step=5", "end"):
        path = folder / f"{name}.ckpt"
        if path.is_dir():
            plain = folder / f"{name} of {trainer.global_rank}.ckpt"
            piper.strategy.checkpoints.consolidate(path, plain, weights_only=False)
            path = plain
        seen[name] = saved(path)
    trainer.validate(trainer.lightning_module, verbose=False)
    seen["validated"] = at.found[-1]
    seen["values at the end"] = values(trainer.lightning_module)
    return seen


def begun_later(run: Run) -> Seen:
    """Fit without averages, then resume with averages."""
    folder = run.folder / "begun later"
    keep = cb.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    run.fit([keep], checkpoint="sharded", enable_checkpointing=True)
    at = Validations()
    resumed = run.fit([at, ema()], resume=folder / "step=5.ckpt", checkpoint="sharded")
    return {"resumed": values(resumed.lightning_module), "validations": at.found}


def ema() -> L.Callback:
    return cb.EMAWeightAveraging(decay=0.7, update_starting_at_step=2)


def equal_weights() -> L.Callback:
    return cb.WeightAveraging(use_buffers=False)


def by_lists() -> L.Callback:
    return cb.WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6))


def swa() -> L.Callback:
    return cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)


TRIALS: dict[str, Callable[[Run], Seen]] = {
    "ema": lambda run: whole_run(run, ema),
    "equal weights": lambda run: whole_run(run, equal_weights),
    "by lists": lambda run: whole_run(run, by_lists, double=True),
    "ema, sharded checkpoint": lambda run: whole_run(run, ema, "sharded", double=True),
    "ema, begun later": begun_later,
    "swa": lambda run: whole_run(run, swa, max_epochs=4),
    "swa, sharded checkpoint": lambda run: whole_run(run, swa, "sharded", double=True, max_epochs=4),
}


# Averages that a user's module or callback computes by itself.


class Shadowed(L.Callback):
    """Averages the weights in a copy of the module, and validates with the copy."""

    def __init__(self) -> None:
        self.shadow: Any = None
        self.own: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.shadow = copy.deepcopy(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        for average, p in zip(self.shadow.parameters(), module.parameters(), strict=True):
            average.mul_(0.7).add_(p, alpha=0.3)

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self.own = {name: p.data.clone() for name, p in module.named_parameters()}
        for average, p in zip(self.shadow.parameters(), module.parameters(), strict=True):
            p.data.copy_(average.data)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        for name, p in module.named_parameters():
            p.data.copy_(self.own[name])

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["averaging_state"] = self.shadow.state_dict()


class Inside(Net):
    """Averages the weights in a submodule, and validates with it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(nn.ModuleList([self.first, self.second])).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for averages, part in zip(self.average, (self.first, self.second), strict=True):
            for average, p in zip(averages.parameters(), part.parameters(), strict=True):
                average.mul_(0.7).add_(p, alpha=0.3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first, second = getattr(self.average, "module", self.average)
        with piper.annotate("PP"):
            hidden = first(batch[0])
        with piper.annotate("PP"):
            self.log("mean", (second(hidden) * self.offset).mean())


class Averaged(Inside):
    """Averages the weights with torch's class."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(nn.ModuleList([self.first, self.second]), avg_fn=get_ema_avg_fn(0.7))

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(nn.ModuleList([self.first, self.second]))


class Normed(Net):
    """A model with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first.append(nn.BatchNorm1d(16))


class Finetuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.first


def unfreezing() -> list[Any]:
    return [cb.BackboneFinetuning(1, backbone_initial_lr=0.05, verbose=False)]


def by_hand(run: Run, make: Callable[[], Any], callbacks: Callable[[], list[Any]] = list) -> Seen:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    at = Validations()
    try:
        trainer = run.fit([*callbacks(), at], module=module, double=True)
    except (piper.PiperError, RuntimeError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    trainer.save_checkpoint(run.folder / "end.ckpt")
    return {"values": values(module), "validations": at.found, "end": saved(run.folder / "end.ckpt")}


def by_norms() -> list[Any]:
    return [
        cb.WeightAveraging(avg_fn=lambda average, p, n: torch.where(p.norm() > average.norm(), p, average))
    ]


BY_HAND: dict[str, Callable[[Run], Seen]] = {
    "shadow": lambda run: by_hand(run, Net, lambda: [Shadowed()]),
    "inside": lambda run: by_hand(run, Inside),
    "inside, in torch's class": lambda run: by_hand(run, Averaged),
    "statistics anew": lambda run: by_hand(run, Normed, lambda: [swa()]),
    "unfreezing": lambda run: by_hand(run, Finetuned, unfreezing),
    "by norms": lambda run: by_hand(run, Net, by_norms),
}


def trace_all(*args: Any) -> None:
    for module in (Net(), Inside(), Averaged()):
        trace(module, next(iter(vectors())), (8, 4, 2), "training_step", precision="64-true")


@sharing_captures
def run_all(jobs: Any, folder: Path, local: bool = False) -> dict[tuple[Any, str], Seen]:
    torch.set_num_threads(1)
    every = {**TRIALS, **BY_HAND}
    return {
        (program, name): every[name](Run(program, folder / str(program) / name, local))
        for program, name in jobs
    }


def work(rank: int, jobs: Any, folder: Path) -> dict[tuple[Any, str], Seen]:
    """Run the jobs in this process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return run_all(jobs, folder)
