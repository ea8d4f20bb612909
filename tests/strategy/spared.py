"""A training on processes of which one is lost at some moment, and a spare that replaces it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics import MeanMetric

import lightning_piper as piper
from lightning_piper.checkpoint import memory_copy
from lightning_piper.checkpoint.late_copies import LateCopies
from lightning_piper.checkpoint.memory_copy import MemoryCopies, MemoryCopy
from lightning_piper.processes.spares import SPARE, SPARES, Spares
from lightning_piper.runtime import collectives
from lightning_piper.runtime.same_machine import shared_memory
from lightning_piper.session.programs import Programs
from lightning_piper.strategy.process_management import OverProcesses
from lightning_piper.strategy.spares._lightning import BeforeFit, outside_checkpoint, random_numbers
from lightning_piper.strategy.spares.module_state import state_beside
from tests import tensors
from tests.axes import EXPERTS, HEADS, columns, everywhere, sequences, sparse
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import trainer, values
from tests.strategy.models import make as make_of_zoo

EPOCHS, BATCHES, LOST_IN = 3, 4, 5  # the process is lost in the batch with this number, in all epochs
PROGRAMS: dict[str, dict[str, int]] = {
    "zero1": {"zero": 1},
    "uncaptured zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "stages": {"pp": 2, "dp": 1, "microbatches": 2},
    "stages frozen": {"pp": 2, "dp": 1, "microbatches": 2},
    "stages of replicas": {"pp": 2, "dp": 2, "microbatches": 2},
}
ALONG_AXES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "sequences": (tensors.decoder, [tensors.grid(cp=2, tp=2), columns(), sequences()]),
    "experts": (sparse, [tensors.grid(ep=2, tp=2), columns(params=HEADS), EXPERTS, everywhere(4)]),
}
CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "accumulates later": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "averages": EMAWeightAveraging,
    "averages converted": EMAWeightAveraging,
    "stochastic averages": lambda: StochasticWeightAveraging(swa_lrs=1e-2),
}
MOMENTS = ("data", "forward", "update", "validation", "save")
# The copy is under way, or made but not complete; between two batches, or epochs; at any time from the begin of a batch.
MORE = ("step", "copy", "copied", "between", "epoch", "soon", "connecting")
ADDING = "adding"  # a part of a divided sum is written
# Entries of the result of `train` that a loss does not change.
RESULTS = ("steps", "rate", "scale", "score", "logged")
BEFORE_BATCH = ("data", "copy", "copied")
WARM = "warm"
PARTS = 8  # as many parts as a batch has at least, under divided sums


class Net(L.LightningModule):
    """Trains with dropout, batch statistics of the whole batch, and a learning rate that follows steps and validations.
    Logs values of whole epochs, and draws a random number in `setup`. May begin to train a parameter in the second
    epoch."""

    shift: Tensor

    def __init__(
        self, uncaptured: bool = False, norms: bool = False, unfreezes: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        norm = nn.LayerNorm(8) if norms else nn.BatchNorm1d(8)
        self.first, self.norm, self.second = nn.Linear(8, 8), norm, nn.Linear(8, 1)
        self.uncaptured = uncaptured
        self.first.bias.requires_grad_(not unfreezes)
        self.second.requires_grad_(not frozen)
        self.errors, self.validated = MeanMetric(), MeanMetric()

    def setup(self, stage: str) -> None:
        self.shift = torch.rand(())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            x = self.norm(torch.tanh(self.first(x)))
        with piper.annotate("PP", 1):
            return self.second(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not self.uncaptured:
            x = torch.dropout(x, 0.2, True)
        elif float(x.sum().detach()) == 0.5:
            x = x + 1
        error = self(x) - y
        loss = error.square().mean()
        self.errors(error.detach().abs())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.log("error", self.errors, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        error = self(batch[0]) - batch[1]
        self.log("validated", error.square().mean(), sync_dist=True)
        self.validated.update(error.abs())

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.validated.compute())
        self.validated.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validated"}}


class Manual(Net):
    """Trains with two optimizers and manual optimization, which adds the gradients of two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch[0]) - batch[1]).square().mean()
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers if batch_idx % 2 else ():
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, sync_dist=True)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        halves = [*self.first.parameters(), *self.norm.parameters()], [*self.second.parameters()]
        return [torch.optim.AdamW(halves[0], lr=1e-2), torch.optim.SGD(halves[1], lr=1e-2, momentum=0.5)]


class Counting(L.Callback):
    """Counts the calls of Python functions from the second batch of the fit to its end, and kills its process at one of
    them."""

    def __init__(self, last: int | None = None) -> None:
        self.calls, self.last = 0, last

    def on_train_batch_end(self, *args: Any) -> None:
        sys.setprofile(self._count)

    def on_train_end(self, *args: Any) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event == "call"
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class History(L.Callback):
    """Keeps the logged values of all validations and epochs in its state."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_train_epoch_end = on_validation_end

    def state_dict(self) -> dict[str, Any]:
        return {"logged": self.logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.logged = state["logged"]


@dataclass(frozen=True)
class Loss:
    """The loss of a process, which happens once in a training.

    Attributes:
        rank: Its rank.
        moment: A moment of a batch, or of the validation or the save after it: one of `MOMENTS`, or `MORE`.
        batch: The batch's number, in all epochs.
        position: For "step", the instruction of the plan. For "adding", the number of the part. For "soon" and
            "connecting", the processor time from the begin of the batch, or of the next connection, to the loss, in
            milliseconds.
        after: The number of another loss that happens before; None if there is no such loss.
    """

    rank: int
    moment: str
    batch: int = LOST_IN
    position: int = 1
    after: int | None = None


class Losing(L.Callback):
    """Kills its process at moments.

    Args:
        losses: The losses of all processes.
        folder: A folder of the training.
        signaled: The signal that the processes get.
    """

    def __init__(self, losses: Sequence[Loss], folder: Path, signaled: str = "SIGKILL") -> None:
        self.losses, self.folder, self.signaled = losses, folder, signaled
        self.parts = 0  # parts of divided sums written in this batch

    def lose(self) -> None:
        """Send the signal to this process. Like Ctrl-C, SIGINT goes to all processes of the training, also spares."""
        if (warm := self.folder / WARM).exists():
            warm.open().close()  # a pipe that the spare opens
        alone = self.signaled != "SIGINT"
        all_ranks = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        for process in [os.getpid()] if alone else map(int, all_ranks):
            os.kill(process, signal.Signals[self.signaled])

    def at(self, trainer: L.Trainer, moment: str, here: Callable[[Loss], bool] = lambda loss: True) -> None:
        """Lose this process now, or soon, if this is the moment of a loss."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready - (moment not in BEFORE_BATCH)
        for number, loss in enumerate(self.losses):
            rank = int(os.environ["LOCAL_RANK"])  # the Trainer of a spare knows its rank later
            is_now = (loss.rank, loss.moment) == (rank, moment) and not trainer.sanity_checking
            is_next = loss.after is None or self.marked(loss.after).exists()
            if not is_now or not is_next or (loss.batch != done and moment != "connecting") or not here(loss):
                continue
            with contextlib.suppress(FileExistsError):
                self.marked(number).touch(exist_ok=False)
                if loss.position and moment in ("soon", "connecting"):
                    signal.setitimer(signal.ITIMER_PROF, loss.position / 1e3)
                else:
                    self.lose()

    def marked(self, number: int) -> Path:
        """The file that exists after a loss."""
        return self.folder / f"lost {number}"

    def watch(self, trainer: L.Trainer) -> None:
        """Look for losses also while processes connect, make copies, or write parts of divided sums."""
        connect, write, make = OverProcesses.setup_environment, MemoryCopy.write, LateCopies.make
        put = shared_memory.Incoming.replace

        def connecting(strategy: Any) -> None:
            self.at(trainer, "connecting")
            connect(strategy)

        def writing(*given: Any) -> Any:
            found = write(*given)
            self.at(trainer, "copy")
            return found

        def making(late: Any) -> None:
            make(late)
            self.at(trainer, "copied")

        def putting(incoming: Any, part: Tensor) -> None:
            self.parts += 1
            self.at(trainer, ADDING, lambda loss: loss.position % PARTS == self.parts % PARTS)
            put(incoming, part)

        OverProcesses.setup_environment = connecting  # type: ignore[method-assign]
        shared_memory.Incoming.replace = putting  # type: ignore[method-assign]
        MemoryCopy.write, LateCopies.make = writing, making  # type: ignore[method-assign]

    def in_data(self, fit: L.Trainer, loader: DataLoader[Any]) -> None:
        collate = loader.collate_fn

        def collating(samples: Any) -> Any:
            self.at(fit, "data")
            return collate(samples)

        loader.collate_fn = collating

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.parts = 0
        self.at(trainer, "soon")
        phase: Any = trainer.strategy.phase  # type: ignore[attr-defined]
        for prepared in phase.fit.programs._prepared.values() if hasattr(phase, "fit") else ():
            prepared.executors[0].observer = lambda code, source: self.instead(trainer, code)

    def instead(self, trainer: L.Trainer, code: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """The instructions of a plan, which may lose the process."""

        def failing(place: int) -> Any:
            self.at(trainer, "step", lambda loss: loss.position % len(code) == place)
            if place == 1:
                self.at(trainer, "forward")
            return code[place]()

        places = {1, *(loss.position % len(code) for loss in self.losses if loss.moment == "step")}
        return [partial(failing, place) if place in places else run for place, run in enumerate(code)]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "between")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "epoch")

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "update")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "validation")

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: Any) -> None:
        if trainer.validating:
            self.at(trainer, "save")


def samples(count: int) -> tuple[Tensor, ...]:
    chance = torch.Generator().manual_seed(1)
    return tuple(torch.randn(count, n, generator=chance, dtype=torch.float64) for n in (8, 1))


class Alive:
    """Stands for a process that another process has started.

    Args:
        ended: Its exit status; None if it runs.
        number: The file with its number, which the process writes as soon as it runs; None if it never ends.
    """

    def __init__(self, ended: int | None = None, number: Path | None = None) -> None:
        self.ended, self.number = ended, number

    def poll(self) -> int | None:
        if self.number is not None and self.number.exists() and (number := self.number.read_text()):
            status = Path("/proc", number, "stat")
            is_alive = status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
            self.ended = None if is_alive else -signal.SIGKILL
        return self.ended


def warm_up(folder: Path, module: Net, otherwise: bool) -> list[bool]:
    """Let a spare open a pipe when it is warm. Return a list of whether each fit uses a kept capture.

    Args:
        otherwise: Whether the module has a hook in the warm-up, which it does not have later.
    """
    own, reuse, reused = OverProcesses._warm_up, Programs.reuse, list[bool]()

    def warming_up(*given: Any) -> None:
        hook = module.first.register_forward_hook(lambda *args: None) if otherwise else None
        own(*given)
        if hook is not None:
            hook.remove()
        Path(folder, WARM).open("w").close()

    def reusing(programs: Programs, *given: Any) -> None:
        reuse(programs, *given)
        reused.append(programs._reused is not None)

    OverProcesses._warm_up, Programs.reuse = warming_up, reusing  # type: ignore[method-assign]
    return reused


def divide_sums() -> None:
    """Let messages of a few bytes go through shared memory, where each process adds up a part of each sum."""
    for module in (collectives, shared_memory):
        module.DIRECT, module.PIECE = 64, 128  # type: ignore[attr-defined]


def become(rank: int, size: int, folder: Path) -> int:
    """Make this process a spare if its rank is not one of `size` ranks. Make copies before each batch, however long they
    take. Return the number of spares."""
    memory_copy.SHARE = math.inf
    spares = int(os.environ["WORLD_SIZE"]) - size
    Path(folder, f"number {rank}").write_text(str(os.getpid()))
    os.environ[SPARES] = str(spares)
    if rank >= size:
        os.environ |= {"LOCAL_RANK": "1", SPARE: str(rank - size)}
    return spares


def launched(fit: L.Trainer, size: int, spares: int, folder: Path | None, ended: int | None = None) -> None:
    """Let the launcher of rank 0 know the other processes, as if it had started them.

    Args:
        fit: The Trainer.
        size, spares: Number of ranks, and of spares.
        folder: The folder with their numbers. None: they never end.
        ended: The exit status of spares; None if they run.
    """
    numbers = [None if folder is None else folder / f"number {each}" for each in range(size + spares)]
    launcher: Any = fit.strategy.launcher
    launcher.procs[:] = [Alive(number=number) for number in numbers[1:size]]
    launcher.waiting[:] = [Alive(ended, number) for number in numbers[size:]]


def without(kind: str) -> None:
    """Do not restore a part of the state."""
    if kind == "other random numbers":
        restore = BeforeFit.restore

        def restoring(before: BeforeFit) -> None:
            before._random = random_numbers()
            restore(before)

        BeforeFit.restore = restoring  # type: ignore[method-assign]
    elif kind == "no sums":
        outside_checkpoint.__globals__["_restore_logged_in_epoch"] = lambda trainer, state: None
    elif kind in ("no metrics", "no gradients"):
        beside, part = state_beside, kind.removeprefix("no ")
        outside_checkpoint.__globals__["state_beside"] = lambda *given: {**beside(*given), part: {}}


def train(
    rank: int, folder: Path, size: int, moment: str, kind: str = "", losses: Sequence[Loss] = ()
) -> dict[str, Any]:
    """Train on `size` processes. Ranks from `size` on are spares. The last rank is lost at a moment; at no moment if
    `moment` is empty.

    Args:
        moment: One of `MOMENTS`, or the number of a call, see `Counting`.
        kind: What is special about the training. The name of a signal: it goes to rank 0.
        losses: Losses in place of a moment, of ranks and spares that have taken their ranks.
    """
    spares = become(rank, size, folder)
    if kind.endswith("rare copies"):
        memory_copy.SHARE = 1e-9
    without(kind)
    if kind.endswith("divided"):
        divide_sums()
        kind = kind.removesuffix(" divided")
    if kind == "changed copy":
        take = MemoryCopies.take

        def changed(copies: MemoryCopies, own: int) -> Any:
            opened = take(copies, own)
            ((start, stop, elements),) = opened.parts["state_dict.first.bias"]
            return replace(
                opened, parts={**opened.parts, "state_dict.first.bias": [(start, stop, elements + 1e-9)]}
            )

        MemoryCopies.take = changed  # type: ignore[method-assign]
    accumulated = 2 if kind in ("accumulated", "saved") else 1
    is_scaled = kind == "replicas scaled"
    data = TensorDataset(*(x.float() if is_scaled else x for x in samples(BATCHES * 4 * size)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    signaled = kind if kind.startswith("SIG") else "SIGKILL"
    last = 0 if kind == "rank 0" or kind == signaled else size - 1
    once = Losing(losses or [Loss(last, moment)], folder, signaled)
    losing: Any = Counting(int(moment)) if moment.isdigit() else once
    lost = bool(losses) or (moment and rank == last)
    counting = Counting()
    often: Any = {"every_n_train_steps": 1} if kind.startswith("saved") else {"monitor": "validated"}
    kept = -1 if kind == "saved by rare copies" else 1
    save = ModelCheckpoint(folder / "saved", filename="{step}", save_top_k=kept, save_last=kept < 0, **often)
    manual = kind in ("manual", "no gradients")
    degrees = {"dp": size} | PROGRAMS.get(kind, {})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaled: Any = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    strategy = piper.PiperStrategy(**degrees, spares=spares, timeout=PATIENCE)
    norms = kind.startswith(("replicas", "zero", "stages"))
    special = kind.startswith("uncaptured"), norms, kind == "unfreezes", kind == "stages frozen"
    module = Manual() if manual else Net(*special)
    reused = warm_up(folder, module, kind.endswith("otherwise")) if kind.startswith(WARM) else []
    callbacks: list[L.Callback] = [history := History(), save]
    if kind in CALLBACKS:
        callbacks.append(CALLBACKS[kind]())
        if kind != "averages converted":  # the callback copies the module before the Trainer converts it
            module.double()
    fit, record = trainer(
        strategy,
        [*callbacks, losing]
        if lost
        else [*callbacks, counting]
        if rank == size - 1 and not moment
        else callbacks,
        devices=size,
        max_steps=-1,
        max_epochs=EPOCHS,
        **scaled if is_scaled else {"precision": "64-true"},
        sync_batchnorm=not manual,
        val_check_interval=2,
        accumulate_grad_batches=accumulated,
        enable_checkpointing=True,
    )
    if spares and rank == 0:
        launched(fit, size, spares, folder if losses else None, 1 if kind == "dead spare" else None)

    def shifted(samples: Any) -> Any:
        x, y = default_collate(samples)
        return x + module.shift, y

    loader.collate_fn = shifted
    if lost and isinstance(losing, Losing):
        losing.in_data(fit, loader)
        losing.watch(fit)
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if kind == "validates":
                fit.validate(module, loader)
            fit.fit(module, loader, DataLoader(data, batch_size=4))
        except Exception as error:
            print(f"rank {fit.global_rank} says: {type(error).__name__}: {error}", flush=True)
            raise
    return {
        "values": values(module),
        "losses": record.losses[-1:],
        "steps": fit.global_step,
        "rate": fit.optimizers[0].param_groups[0]["lr"],
        "scale": scaler.get_scale(),
        "calls": counting.calls,
        "reused": reused,
        "score": save.best_model_score,
        "logged": history.logged,
        "files": sorted(path.name for path in (folder / "saved").iterdir()),
        "told": [str(each.message) for each in told if "[PIPER-W033]" in str(each.message)],
    }


class Launched(L.Callback):
    """Calls `launched`, and lets losses be looked for everywhere."""

    def __init__(self, losing: Losing, *given: Any) -> None:
        self.losing, self.given, self.is_done = losing, given, False

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        if self.is_done:
            return
        self.is_done = True
        self.losing.watch(trainer)
        if trainer.is_global_zero:
            launched(trainer, *self.given)


def train_along_axes(rank: int, folder: Path, name: str, losses: Sequence[Loss]) -> dict[str, Any]:
    """Train on four processes that have parts of tensors, sequences or experts."""
    spares = become(rank, 4, folder)
    make, program = ALONG_AXES[name]
    module, losing = make(), Losing(losses, folder)
    strategy = piper.PiperStrategy(program, spares=spares, timeout=PATIENCE)
    callbacks = [losing, *([Launched(losing, 4, spares, folder)] if spares else [])]
    tensors.fit(module, strategy, devices=4, max_epochs=2, callbacks=callbacks)
    return {"values": values(module)}


def train_again(rank: int, folder: Path, size: int) -> int:
    """Fit three times with one Trainer. Return the number of stores for process groups that were made."""
    spares = become(rank, size, folder)
    own, stores = Spares.group_store, list[Any]()

    def making(waiting: Spares) -> Any:
        stores.append(own(waiting))
        return stores[-1]

    Spares.group_store = making  # type: ignore[method-assign]
    strategy = piper.PiperStrategy(spares=spares, timeout=PATIENCE)
    fit, _ = trainer(strategy, devices=size, max_epochs=1, max_steps=-1)
    if rank == 0:
        launched(fit, size, spares, None)
    module, data = make_of_zoo("mlp", samples=16)
    for epochs in (1, 2, 3):
        fit.fit_loop.max_epochs = epochs
        fit.fit(module, data)
    return len(stores)
