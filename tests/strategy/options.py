"""Callbacks and Trainer options as a new user would try them, each in a short training. They run on one
device with plain Lightning, and on two processes as a pipeline and with sharded replicas. All of them use the
same batches, so that their results can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import PROGRAM, QUIET, trace, values
from tests.strategy.models import MLP, vectors

PROGRAMS: dict[str, Any] = {
    "PP2": list(PROGRAM),
    "ZeRO-3": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ],
}
Seen = dict[str, Any]


class Net(MLP):
    """A model with a scheduler that a trial chooses."""

    schedule: Callable[[torch.optim.Optimizer, L.Trainer], dict[str, Any]] | None = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self.trainer)}


class Validated(Net):
    """A model that runs a validation, so that there is a sanity check."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with piper.annotate("PP"):
            hidden = self.first(batch[0])
        with piper.annotate("PP"):
            self.log("mean", self.second(hidden).mean())

    def val_dataloader(self) -> Any:
        return vectors(seed=1)


class Keeping(Validated):
    """A model whose optimizer is made in the constructor, and used in all fits."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Sized(Net):
    """A model with its own data, in batches of a size that can be changed."""

    batch_size = 4

    def train_dataloader(self) -> Any:
        return vectors(batch_size=self.batch_size)


class Rates(L.Callback):
    """Records the learning rate at every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Run:
    """How a trial trains: its strategy and its folder."""

    def __init__(self, program: str | None, folder: Path) -> None:
        self.program, self.folder = program, folder

    def trainer(self, **options: Any) -> L.Trainer:
        strategy: Any = "auto"
        if self.program is not None:
            strategy = piper.PiperStrategy(PROGRAMS[self.program], timeout=PATIENCE)
        options = {
            **QUIET,
            "accelerator": "cpu",
            "devices": 1 if self.program is None else 2,
            "precision": "64-true",
            "use_distributed_sampler": False,
            "default_root_dir": self.folder,
            **options,
        }
        return L.Trainer(strategy=strategy, **options)

    def fit(
        self,
        callbacks: Any = (),
        schedule: Any = None,
        module: Any = None,
        batches: Any = None,
        **options: Any,
    ) -> L.Trainer:
        if module is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                module = Net()
        if schedule is not None:
            module.schedule = schedule
        if "max_steps" not in options and "max_epochs" not in options and "fast_dev_run" not in options:
            options["max_epochs"] = 2
        trainer = self.trainer(callbacks=list(callbacks), **options)
        own = isinstance(module, Sized)
        trainer.fit(module, *([] if own else [vectors() if batches is None else batches]))
        return trainer

    def seen(self, trainer: L.Trainer, **more: Any) -> Seen:
        return {
            "values": values(trainer.lightning_module),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
            **more,
        }


TRIALS: dict[str, Callable[[Run], Seen]] = {}


def trial(work: Callable[[Run], Seen]) -> Callable[[Run], Seen]:
    TRIALS[work.__name__] = work
    return work


@trial
def early_stopping_within_an_epoch(run: Run) -> Seen:
    class Soon(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.should_stop = True

    return run.seen(run.fit([Soon()]))


@trial
def checkpoints(run: Run) -> Seen:
    save = cb.ModelCheckpoint(
        run.folder,
        monitor="train_loss_step",
        save_top_k=2,
        every_n_train_steps=2,
        filename="{step}",
        save_last=True,
    )
    trainer = run.fit([save], enable_checkpointing=True)
    names = sorted(Path(path).name for path in save.best_k_models)
    scores = sorted(map(float, save.best_k_models.values()))
    content = torch.load(save.best_model_path, weights_only=True)
    return run.seen(
        trainer, names=names, scores=scores, best=content["state_dict"], last=Path(save.last_model_path).name
    )


@trial
def checkpoint_in_a_hook(run: Run) -> Seen:
    class Saves(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(run.folder / "mine.ckpt")

    trainer = run.fit([Saves()])
    content = torch.load(run.folder / "mine.ckpt", weights_only=True)
    states = {key: state["momentum_buffer"] for key, state in content["optimizer_states"][0]["state"].items()}
    return run.seen(trainer, saved=content["state_dict"], momentum=states)


@trial
def summary(run: Run) -> Seen:
    class Counts(cb.ModelSummary):
        def summarize(
            self, summary_data: Any, total: int, trainable: int, size: float, *args: Any, **kwargs: Any
        ) -> None:
            found.update(rows=[list(column[1]) for column in summary_data], counts=[total, trainable, size])

    found: dict[str, Any] = {}
    return run.seen(run.fit([Counts(max_depth=2)], max_epochs=1), **found)


@trial
def progress_bars(run: Run) -> Seen:
    class Metrics(cb.TQDMProgressBar):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module, *args)
            shown.append({k: float(v) for k, v in self.get_metrics(trainer, module).items()})

    shown: list[dict[str, float]] = []
    trainer = run.fit([Metrics()], enable_progress_bar=True)
    run.fit([cb.RichProgressBar()], enable_progress_bar=True, max_steps=2)
    return run.seen(trainer, shown=shown)


@trial
def throughput(run: Run) -> Seen:
    monitor = cb.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    found: list[dict[str, float]] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            found.append(metrics)

    trainer = run.fit([monitor], logger=Logger(run.folder), log_every_n_steps=1)
    rates = [m for m in found if "train/device/samples_per_sec" in m]
    factors = {round(m.get("train/samples_per_sec", 0.0) / m["train/device/samples_per_sec"]) for m in rates}
    return {
        "values": values(trainer.lightning_module),
        "samples": [m["train/samples"] for m in rates],
        "factors": factors,
    }


@trial
def device_stats(run: Run) -> Seen:
    found: list[str] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            found.extend(k for k in metrics if "on_train_batch" in k)

    class Stats(cb.DeviceStatsMonitor):
        def setup(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            trainer.accelerator.get_device_stats = lambda device: {"load": 1.0}  # type: ignore[method-assign]

    trainer = run.fit([Stats(cpu_stats=True)], logger=Logger(run.folder), log_every_n_steps=1, max_epochs=1)
    return run.seen(trainer, stats=found)


@trial
def monitors_and_timers(run: Run) -> Seen:
    rates, timer = cb.LearningRateMonitor(logging_interval="step"), cb.Timer(timedelta(hours=1))
    lines = CSVLogger(run.folder)
    step = lambda o, t: {"scheduler": lr_scheduler.StepLR(o, 2, 0.5), "interval": "step"}  # noqa: E731
    trainer = run.fit([rates, timer], step, logger=lines, log_every_n_steps=1)
    return run.seen(trainer, lrs=rates.lrs, timed=timer.time_elapsed("train") > 0)


@trial
def max_time(run: Run) -> Seen:
    trainer = run.fit(max_time=timedelta(microseconds=1), max_epochs=100)
    return run.seen(trainer)


@trial
def accumulation_schedule(run: Run) -> Seen:
    return run.seen(run.fit([cb.GradientAccumulationScheduler({0: 2, 1: 3})], max_epochs=3))


@trial
def schedulers(run: Run) -> Seen:
    """Schedulers that take steps per epoch, per batch, by a number of steps that the Trainer estimates, and
    on plateaus of metrics.
    """
    found: Seen = {}
    kinds: dict[str, Any] = {
        "epoch": lambda o, t: {"scheduler": lr_scheduler.ExponentialLR(o, 0.5)},
        "every second step": lambda o, t: {
            "scheduler": lr_scheduler.StepLR(o, 1, 0.5),
            "interval": "step",
            "frequency": 2,
        },
        "one cycle": lambda o, t: {
            "scheduler": lr_scheduler.OneCycleLR(o, 0.2, total_steps=t.estimated_stepping_batches),
            "interval": "step",
        },
        "plateau": lambda o, t: {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
            "monitor": "train_loss_epoch",
        },
        "plateau of steps": lambda o, t: {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.9),
            "monitor": "train_loss_step",
            "interval": "step",
            "strict": True,
        },
    }
    for name, kind in kinds.items():
        rates = Rates()
        found[name] = run.seen(run.fit([rates], kind, max_epochs=4), rates=rates.rates)
    return found


@trial
def limits(run: Run) -> Seen:
    return {
        "number": run.seen(run.fit(limit_train_batches=3)),
        "part": run.seen(run.fit(limit_train_batches=0.5)),
        "overfit": run.seen(run.fit(overfit_batches=2, max_epochs=3, batches=vectors(shuffle=True))),
        "fast": run.seen(run.fit(fast_dev_run=True)),
        "some": run.seen(run.fit(fast_dev_run=4)),
        "steps": run.seen(run.fit(max_steps=7)),
        "reloaded": run.seen(run.fit(reload_dataloaders_every_n_epochs=1, max_epochs=3)),
    }


@trial
def switches(run: Run) -> Seen:
    L.seed_everything(3, workers=True, verbose=False)
    found = {
        "anomaly": run.seen(run.fit(detect_anomaly=True, max_epochs=1)),
        "deterministic": run.seen(run.fit(deterministic=True, max_epochs=1, batches=vectors(shuffle=True))),
        "benchmark": run.seen(run.fit(benchmark=True, inference_mode=False, max_epochs=1)),
        "barebones": run.seen(run.fit(barebones=True, max_epochs=1, **{k: None for k in QUIET})),
        "by value": run.seen(run.fit(gradient_clip_val=0.01, gradient_clip_algorithm="value")),
    }
    torch.use_deterministic_algorithms(False)
    return found


@trial
def lr_finder(run: Run) -> Seen:
    finder = cb.LearningRateFinder(min_lr=1e-5, max_lr=1e-1, num_training_steps=10, early_stop_threshold=None)
    return run.seen(run.fit([finder]), found=finder.optimal_lr.results["loss"])


@trial
def gradient_norms(run: Run) -> Seen:
    """The norm of the whole module's gradients on every process. Lightning's own function sees only what a
    process holds, and must not return that as the norm of all.
    """
    found: list[dict[str, float]] = []
    refusals: set[str] = set()

    class Norms(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
            for p in (2, 1, "inf"):
                found.append({k: float(v) for k, v in piper.grad_norm(module, p).items()})
            try:
                grad_norm(module, 2)
            except piper.PiperError as error:
                refusals.add(str(error))
            module.log_dict(piper.grad_norm(module, 2))

    return run.seen(run.fit([Norms()], max_epochs=1), norms=found, refusals=refusals)


@trial
def gradients_changed_in_hooks(run: Run) -> Seen:
    """Hooks that change gradients by iterating over the module's parameters, as code for one device does."""
    found: list[torch.Tensor] = []

    class Changes(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
            found.append(clip_grad_norm_(module.parameters(), 0.5))
            found.append(clip_grad_norm_(module.second.parameters(), 0.3, 1.0))
            found.append(
                clip_grad_norm_(
                    [p for p in module.parameters() if p.dim() > 1], 0.2, float("inf"), foreach=False
                )
            )
            found.append(
                torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            )
            for param in (p for p in module.parameters() if p.grad is not None):
                found.append(clip_grad_norm_(param, 0.1))
                torch.nan_to_num(param.grad, nan=0.0, out=param.grad)
                param.grad.data.mul_(1.5)
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.02)
            total = torch.nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.05, total)
            found.append(total)

    return run.seen(run.fit([Changes()]), norms=found)


@trial
def clipping_by_hand(run: Run) -> Seen:
    """Clip all gradients together and group by group, with several kinds of norms and with a function that
    was imported by name.
    """
    found: list[torch.Tensor] = []

    class ByHand(Net):
        def configure_optimizers(self) -> Any:
            first, second = (list(part.parameters()) for part in (self.first, self.second))
            trained = [p for p in (*first, *second) if p.requires_grad]
            return torch.optim.SGD(
                [{"params": trained[:1] + trained[2:4]}, {"params": trained[1:2] + trained[4:]}], lr=0.1
            )

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            groups = [group["params"] for group in optimizer.param_groups]
            for p in (1, 2, float("inf")):
                found.append(
                    clip_grad_norm_(
                        (x for group in groups for x in group), 0.9 * float(found[-1]) if found else 1.0, p
                    )
                )
            found.append(clip_grad_norm_(groups[0], 0.01))
            found.append(
                torch.nn.utils.get_total_norm(
                    [x.grad for group in groups for x in group if x.grad is not None]
                )
            )
            found.append(torch.nn.utils.get_total_norm([torch.ones(4)]))  # tensors that are no gradients

        def optimizer_zero_grad(self, *args: Any) -> None:
            self.zero_grad()  # also the shards, which are not in the module

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = ByHand()
    return run.seen(run.fit(module=module), norms=found)


@trial
def changes_before_the_first_batch(run: Run) -> Seen:
    """The module is whole after the sanity check, too, and has the parameters that the optimizer has."""

    class Changes(cb.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.second)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 0:
                self.unfreeze_and_add_param_group(module.second[2], optimizer, lr=0.3)

        @torch.no_grad()
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            for p in trainer.optimizers[0].param_groups[0]["params"]:
                p.mul_(0.5)
            module.second[2].bias.fill_(0.25)

        on_sanity_check_end = on_train_start

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Validated()
    params = list(module.parameters())
    trainer = run.fit([Changes()], module=module)
    return run.seen(
        trainer, same=[x is y for x, y in zip(params, module.parameters(), strict=True)], held=params
    )


@trial
def an_optimizer_made_before(run: Run) -> Seen:
    """The optimizer exists before the fit, and a validation comes before the fit."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Keeping()
    run.trainer().validate(module, verbose=False)
    return run.seen(run.fit(module=module, max_epochs=1))


def trace_all(*args: Any) -> None:
    """Trace the steps that most trials train."""
    trace(Net(), next(iter(vectors())), (8, 4, 2), "training_step", precision="64-true")


def run_all(program: str | None, folder: Path) -> dict[str, Seen]:
    found = {}
    for name, work in TRIALS.items():
        found[name] = work(Run(program, folder / str(program) / name))
        torch.use_deterministic_algorithms(False)
        torch.set_anomaly_enabled(False)
    return found
