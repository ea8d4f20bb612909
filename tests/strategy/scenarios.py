"""Trainings that run on real processes and, for comparison, with all devices in one process.

`train` runs the named trainings one after another in the same processes. As a script that Lightning's
launcher or torchrun starts, this file runs them as well, and each process writes what it has seen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

import lightning_piper as piper
from lightning_piper.runtime import groups
from tests.distributed.processes import LIMIT, PATIENCE
from tests.strategy.fitting import PROGRAM, Batches, Record, sharing_captures, trainer, values
from tests.strategy.models import MLP, Tied, make, vectors

ROOT = Path(__file__).parents[2]
GPIPE = tuple(piper.schedules.gpipe(stages=2, microbatches=4))


@dataclass
class Setting:
    """How a scenario runs (on processes, or with all devices in one process), and its folder."""

    local: bool
    folder: Path

    def trainer(
        self, program: Any = PROGRAM, callbacks: Any = (), **options: Any
    ) -> tuple[L.Trainer, Record]:
        own = {k: options.pop(k) for k in ("verify",) if k in options}
        transport: Any = "local" if self.local else "process"
        strategy = piper.PiperStrategy(list(program), transport=transport, timeout=PATIENCE, **own)
        return trainer(strategy, callbacks, devices=1 if self.local else 2, **options)


Outcome = dict[str, Any]
SCENARIOS: dict[str, Callable[[Setting], Outcome]] = {}


def scenario(work: Callable[[Setting], Outcome]) -> Callable[[Setting], Outcome]:
    SCENARIOS[work.__name__] = work
    return work


class Holdings(L.Callback):
    """Records what this process holds in the middle of the training."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.optimized: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.held = [n for n, x in [*module.named_parameters(), *module.named_buffers()] if not x.is_meta]
        self.optimized = [len(g["params"]) for g in trainer.optimizers[0].param_groups]


def outcome(module: L.LightningModule, record: Record, **more: Any) -> Outcome:
    return {
        "values": values(module),
        "losses": record.losses,
        "logged": record.logged,
        "epochs": record.epochs,
        **more,
    }


def five_steps(setting: Setting, name: str, **options: Any) -> Outcome:
    module, loader = make(name)
    holdings = Holdings()
    fit, record = setting.trainer(callbacks=[holdings], **options)
    torch.manual_seed(9)
    fit.fit(module, loader)
    seed = fit.strategy.phase.fit.seed  # type: ignore[attr-defined]
    return outcome(module, record, held=holdings.held, optimized=holdings.optimized, seed=seed)


@scenario
def mlp(setting: Setting) -> Outcome:
    return five_steps(setting, "mlp")


@scenario
def dropout(setting: Setting) -> Outcome:
    return five_steps(setting, "dropout", verify="each")


@scenario
def tied(setting: Setting) -> Outcome:
    return five_steps(setting, "tied", verify="first_batch")


@scenario
def conv(setting: Setting) -> Outcome:
    return five_steps(setting, "conv")


@scenario
def clipped(setting: Setting) -> Outcome:
    return five_steps(setting, "tied", gradient_clip_val=0.05, accumulate_grad_batches=2, max_steps=4)


@scenario
def clipped_by_value(setting: Setting) -> Outcome:
    return five_steps(setting, "mlp", gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Wide(L.LightningModule):
    """Parameters of three dtypes, the narrowest one first; and a hook that measures their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.turn = torch.nn.Parameter(torch.ones(8, dtype=torch.complex128) * (1 + 1j))
        self.first, self.second = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.norms: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = (torch.tanh(self.first(batch * self.scale)) * self.turn).real
        with piper.annotate("PP", 1):
            return self.second(hidden).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        )
        self.norms += piper.grad_norm(self, 2.0).values()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@scenario
def dtypes(setting: Setting, strategy: Any = None) -> Outcome:
    module, program = Wide(), [piper.Place(filter={"PP": i}, devices=[i]) for i in (0, 1)]
    fit, record = (
        setting.trainer(program, gradient_clip_val=0.1)
        if strategy is None
        else trainer(strategy, gradient_clip_val=0.1)
    )
    fit.fit(
        module,
        Batches(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(5)),
    )
    return outcome(module, record, norms=module.norms)


@scenario
def sizes(setting: Setting) -> Outcome:
    """Batches with other numbers of samples than the first batch, among them fewer samples than there are
    microbatches.
    """
    g = torch.Generator().manual_seed(5)
    batches = Batches(
        (torch.randn(n, 8, generator=g), torch.randn(n, 4, generator=g)) for n in (8, 2, 8, 12, 5)
    )
    module, _ = make("mlp")
    fit, record = setting.trainer(max_steps=-1, max_epochs=2)
    fit.fit(module, batches)
    return outcome(module, record)


@scenario
def stream(setting: Setting) -> Outcome:
    """Data that can be read only once, with the strategy given by its name and the program given by the
    module.
    """
    module, loader = make("tied")
    module.piper_directives = lambda: list(GPIPE)  # type: ignore[assignment]
    strategy: Any = piper.PiperStrategy(transport="local") if setting.local else "piper"
    fit, record = trainer(strategy, devices=1 if setting.local else 2, max_steps=-1, max_epochs=1)
    fit.fit(module, (batch for batch in loader))
    return outcome(module, record)


@scenario
def unseeded_shuffle(setting: Setting) -> Outcome:
    """Processes that start with different parameters and random numbers train as rank 0 would."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    module, _ = make("mlp", seed=rank)
    torch.manual_seed(100 + rank)
    fit, record = setting.trainer(max_steps=-1, max_epochs=2)
    fit.fit(module, vectors(shuffle=True))
    torch.manual_seed(0)
    return outcome(module, record)


@scenario
def checkpoints(setting: Setting) -> Outcome:
    """Save on processes, resume under another program, and save after the fit."""
    module, loader = make("tied")
    save = ModelCheckpoint(setting.folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit, record = setting.trainer(callbacks=[save], max_steps=5, enable_checkpointing=True)
    fit.fit(module, loader)
    fit.save_checkpoint(setting.folder / "after.ckpt")
    resumed, _ = make("tied", seed=1)
    fit, _ = setting.trainer(GPIPE, max_steps=10)
    fit.fit(resumed, loader, ckpt_path=str(setting.folder / "step=5.ckpt"))
    return outcome(module, record, resumed=values(resumed))


class Equipped(MLP):
    """A module with everything that could meet the missing parts of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(2, 8)
        self.seen = MeanMetric()
        self.total = SumMetric()
        self.totals: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.update(outputs["loss"])
        self.total.update(len(batch[0]))
        self.log("seen", self.seen, on_epoch=True, on_step=False)

    def on_train_epoch_end(self) -> None:
        self.totals.append(float(self.total.compute()))
        self.log("totals", self.totals[-1], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.named_parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@scenario
def equipped(setting: Setting) -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Equipped()
    loader = DataLoader(vectors().dataset, batch_size=8, shuffle=True, num_workers=1)
    torch.manual_seed(9)
    save = ModelCheckpoint(setting.folder, monitor="train_loss_epoch", save_top_k=1, filename="best")
    fit, record = setting.trainer(
        callbacks=[save, EarlyStopping("seen", patience=3), LearningRateMonitor()],
        max_steps=-1,
        max_epochs=2,
        limit_val_batches=0,
        enable_checkpointing=True,
        enable_model_summary=True,
        logger=CSVLogger(setting.folder),
        log_every_n_steps=1,
        profiler="simple",
    )
    fit.fit(module, loader, vectors())
    assert module.example_input_array is not None
    return outcome(module, record, totals=module.totals, best=float(save.best_model_score))  # type: ignore[arg-type]


@scenario
def leaks(setting: Setting) -> Outcome:
    """The sockets and threads of this process after each of five fits."""
    counts = []
    for _ in range(5):
        module, loader = make("mlp")
        fit, _ = setting.trainer()
        fit.fit(module, loader)
        del fit, module
        gc.collect()
        counts.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
    return {"counts": counts}


class Validated(MLP):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with piper.annotate("PP"):
            hidden = self.first(batch[0])
        with piper.annotate("PP"):
            self.log("squares", (self.second(hidden) ** 2).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


class Stops(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise KeyError("the user's own")


@scenario
def communicators(setting: Setting) -> Outcome:
    """The communicators that outlive their runs while the runs' Trainers exist, without a search for cycles."""
    made: list[weakref.ref[Any]] = []

    make = groups.new_group_of_members

    def new_group(*args: Any, **options: Any) -> Any:
        group = make(*args, **options)
        made.append(weakref.ref(group))
        return group

    setting.trainer()[0].fit(MLP(), vectors())  # makes a communicator that all fits share
    kept = []
    gc.collect()
    gc.disable()
    with mock.patch.object(groups, "new_group_of_members", new_group), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*recorded no step")  # the profiler is there for its communicators
        for callbacks in ([], [Stops()]):
            fit, _ = setting.trainer(callbacks=callbacks, limit_val_batches=2, profiler=piper.PiperProfiler())
            module = Validated()
            with contextlib.suppress(KeyError):
                fit.fit(module, vectors(), vectors())
                fit.test(module, vectors(), verbose=False)
            kept.append(fit)
    for reference in made:
        if reference() is not None:
            # of the run that failed: it is known to torch, and ends with the default group
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(reference())
    left = sum(group() is not None for group in made)
    gc.enable()
    return {"made": len(made), "left": left}


@scenario
def refused(setting: Setting) -> Outcome:
    """Requests that raise the same error in all processes, and after which the processes can go on."""

    class Hidden(MLP):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(width, 1)

    class Repeated(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("repeated", torch.ones(1).expand(16), persistent=False)

    class LBFGS(MLP):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS([p for p in self.parameters() if p.requires_grad])

    def error(work: Callable[[], Any]) -> str:
        try:
            work()
        except piper.PiperError as found:
            return f"{type(found).__name__}: {found}"
        return "no error"

    def fit(module: L.LightningModule, *loaders: Any, program: Any = PROGRAM, **options: Any) -> str:
        return error(lambda: setting.trainer(program, **options)[0].fit(module, *(loaders or [vectors()])))

    rank = int(os.environ.get("LOCAL_RANK", 0))
    data = vectors()
    sampler = torch.utils.data.DistributedSampler(data.dataset, num_replicas=2, rank=0)  # type: ignore[arg-type]
    return {
        "devices": fit(MLP(), program=piper.schedules.gpipe(stages=1, microbatches=2)[1:]),
        "on exception": fit(
            MLP(),
            callbacks=[ModelCheckpoint(setting.folder, save_on_exception=True)],
            enable_checkpointing=True,
        ),
        "lbfgs": fit(LBFGS()),
        "length": fit(MLP(), vectors(samples=40 - 8 * rank)),
        "values": fit(MLP(), vectors(seed=rank)),
        "other shapes": fit(Hidden(16 + rank)),
        "other module": fit(MLP() if rank == 0 else Tied()),
        "sampler": fit(MLP(), DataLoader(data.dataset, batch_size=8, sampler=sampler)),
        "repeated": fit(Repeated()),
        "nothing": fit(MLP(), vectors()),
    }


def run(names: list[str], folder: Path, local: bool) -> dict[str, Outcome]:
    found = {}
    for name in names:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = SCENARIOS[name](Setting(local, place))
    return found


@sharing_captures
def train(rank: int, names: list[str], folder: Path) -> dict[str, Outcome]:
    """Run scenarios in this process."""
    return run(names, folder, local=False)


def launch_script(names: list[str], folder: Path, torchrun: bool) -> list[dict[str, Outcome]]:
    """Run scenarios on two processes that Lightning or torchrun starts. Returns what each process has seen."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
    command = [sys.executable, *command, __file__, str(folder), *names]
    done = popen(command)
    try:
        said, _ = done.communicate(timeout=LIMIT.total_seconds())
    finally:
        done.kill()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said[-8000:]}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def popen(command: list[str], **more: str) -> subprocess.Popen[str]:
    """Start the command that starts the processes; `more` is added to its environment."""
    own = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    env = {k: v for k, v in os.environ.items() if k not in own}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def equal(a: Any, b: Any) -> bool:
    """Whether two values, which may be lists and dicts, are equal bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        results = run(sys.argv[2:], Path(sys.argv[1]), local=False)
    except BaseException:
        traceback.print_exc()
        raise
    torch.save(results, Path(sys.argv[1]) / f"rank{os.environ['LOCAL_RANK']}.pt")
