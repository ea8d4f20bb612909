"""Puts faults into a training of PP2 x DP2 on four processes, each on one rank, of one kind and at one
moment, and checks what must hold afterwards.

After every fault, all other ranks end in time and name the rank, no rank is left, no checkpoint is damaged,
and a training that resumes from the last checkpoint ends with the same bits as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import lightning_piper as piper
from lightning_piper.checkpoint.files import read_manifest, verify
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.processes.background import BackgroundThread
from lightning_piper.session import programs
from lightning_piper.strategy.fit import Fit
from tests.distributed.processes import PATIENCE, Ended, run_ranks
from tests.strategy.fitting import sharing_captures, trainer, values
from tests.strategy.models import make
from tests.strategy.scenarios import equal
from tests.strategy.sharded import dp2, pp2_dp2

RANKS, EPOCHS = 4, 4
EPOCH = 2  # the epoch of the fault; at that time there are two checkpoints
KINDS = ("raise", "memory", "exit", "kill", "link", "stop", "sleep")
MOMENTS = (
    "set-up",
    "compile",
    "data",
    "forward",
    "step",
    "optimizer",
    "checkpoint",
    "end of epoch",
    "teardown",
)
HANGS = ("stop", "sleep")
# seconds, of communication, where a rank hangs; else it is so long that it cannot be what ends a rank
TIMEOUT = 20.0
ENDED_IN = 100.0  # maximum seconds from a failure until all other ranks have ended, also on a slow machine
HUNG_FOR = 2 * TIMEOUT + ENDED_IN  # maximum seconds from the moment at which a rank hangs


@dataclass(frozen=True)
class Fault:
    """`position`: of the instruction, for `step`, and of the call that changes files, for `checkpoint`;
    `behind`: checkpoints are written behind the training, and what happens at `checkpoint` happens there.
    """

    rank: int
    kind: str
    moment: str
    checkpoint: str = "consolidated"
    position: int = 0
    behind: bool = False


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    seconds: The time from the fault until the last other rank had ended.
    wrong: The conditions that do not hold, in words.
    """

    fault: Fault
    seconds: float
    wrong: list[str]


def draw(count: int, seed: int, behind: bool = False) -> list[Fault]:
    """Random faults. Every pair of a kind and a moment occurs once before any pair occurs again.

    Args:
        behind: Checkpoints are written in the background of the training.
    """
    chance = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    faults = []
    for _ in range(count):
        if not pairs:
            pairs = [(kind, moment) for kind in KINDS for moment in MOMENTS]
            chance.shuffle(pairs)
        kind, moment = pairs.pop()
        faults.append(
            Fault(
                chance.randrange(RANKS),
                kind,
                moment,
                chance.choice(("consolidated", "sharded")),
                chance.randrange(30),
                behind,
            )
        )
    return faults


# Code that one rank runs


def happen(kind: str, folder: Path) -> None:
    """Let the fault happen in this process."""
    (folder / "fault").write_text(str(time.monotonic()))
    if kind == "raise":
        raise ValueError("something of the user's")
    if kind == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        bytearray(1 << 30)
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "link":
        _break_connections()
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "sleep":
        time.sleep(1000)


def _break_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)


class Trouble(L.Callback):
    """Lets the fault happen in a hook of the Trainer."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder

    def at(self, moment: str, now: bool = True) -> None:
        if self.fault.moment == moment and now:
            happen(self.fault.kind, self.folder)

    def setup(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.at("set-up")

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.fault.moment in ("forward", "step") and trainer.current_epoch == EPOCH and batch_idx == 1:
            for prepared in trainer.strategy.phase.fit.programs._prepared.values():  # type: ignore[attr-defined]
                prepared.executors[0].observer = self.instead

    def instead(self, code: list[Callable[[], Any]], source: Any) -> list[Callable[[], Any]]:
        """The plan's instructions with the fault before one of them."""
        place = 1 if self.fault.moment == "forward" else self.fault.position % len(code)

        def failing() -> Any:
            happen(self.fault.kind, self.folder)
            return code[place]()

        return [*code[:place], failing, *code[place + 1 :]]

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.at("optimizer", trainer.current_epoch == EPOCH)

    def in_data(self, module: L.LightningModule, loader: Any) -> None:
        """Let the fault happen while samples are collated."""
        collate = loader.collate_fn

        def collating(samples: Any) -> Any:
            self.at("data", module.trainer.current_epoch == EPOCH)
            return collate(samples)

        loader.collate_fn = collating

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.at("end of epoch", trainer.current_epoch == EPOCH)


CHANGES = {"mkdir", "rename", "replace", "unlink", "rmdir", "open", "close", "fsync"}


def while_saving(trouble: Trouble) -> Any:
    """Replace the function that writes, so that the fault happens before a call that changes files, or after
    the last one.
    """
    saves = 0

    def saving(write: Callable[[], object]) -> None:
        nonlocal saves
        saves += 1
        left: int | None = trouble.fault.position

        def profile(frame: Any, event: str, called: Any) -> None:
            nonlocal left
            if event == "c_call" and called.__name__ in CHANGES and left is not None:
                left -= 1
                if left < 0:
                    left = None
                    trouble.at("checkpoint")

        sys.setprofile(
            profile if saves == 2 * EPOCH + 1 else None
        )  # each epoch saves its own checkpoint and the last one
        try:
            write()
        finally:
            sys.setprofile(None)
        trouble.at("checkpoint", saves == 2 * EPOCH + 1 and left is not None)

    # The fault of a process that writes nothing in the background happens where all processes save.
    if trouble.fault.behind and (trouble.fault.checkpoint == "sharded" or trouble.fault.rank == 0):
        start = BackgroundThread.start
        return mock.patch.object(
            BackgroundThread, "start", lambda behind, work: start(behind, lambda: saving(work))
        )
    save = piper.PiperStrategy.save_checkpoint
    return mock.patch.object(
        piper.PiperStrategy, "save_checkpoint", lambda *args, **how: saving(lambda: save(*args, **how))
    )


@sharing_captures
def train(rank: int, folder: Path, fault: Fault, checkpoint: str, ranks: int = RANKS) -> Any:
    """Train on one rank. No fault happens on the other ranks, and none at all if `fault.rank` is not one of
    the ranks.
    """
    own = fault.rank == rank
    trouble = Trouble(fault, folder)
    compile_step, close = programs.compile_step, Fit.close

    def compiling(*args: Any, **kwargs: Any) -> Any:
        trouble.at("compile")
        return compile_step(*args, **kwargs)

    def closing(self: Fit, failed: bool) -> None:
        trouble.at("teardown", not failed)
        close(self, failed)

    module, loader = make("dropout", samples=16, batch_size=4)
    timeout = timedelta(seconds=TIMEOUT) if fault.kind in HANGS else PATIENCE
    program = pp2_dp2(3, 1) if ranks == RANKS else dp2(3)
    io = AsyncCheckpointIO() if fault.behind else None
    strategy = piper.PiperStrategy(program, timeout=timeout, checkpoint=checkpoint, checkpoint_io=io)  # type: ignore[arg-type]
    save = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_last=True, save_top_k=-1)
    callbacks = [trouble, save] if own else [save]
    fit, record = trainer(
        strategy, callbacks, devices=ranks, max_steps=-1, max_epochs=EPOCHS, enable_checkpointing=True
    )
    torch.manual_seed(9)
    with contextlib.ExitStack() as stack:
        if own:
            stack.enter_context(mock.patch.object(programs, "compile_step", compiling))
            stack.enter_context(mock.patch.object(Fit, "close", closing))
            stack.enter_context(while_saving(trouble))
            trouble.in_data(module, loader)
        try:
            fit.fit(module, loader, ckpt_path="last")
        except BaseException as error:
            print(
                f"rank {rank} says: {type(error).__name__}: {error}",
                *getattr(error, "__notes__", []),
                flush=True,
            )
            raise
    return {"values": values(module), "losses": record.losses, "steps": fit.global_step}


# Code that starts all ranks

NONE = Fault(-1, "none", "never")


def undisturbed(folder: Path) -> dict[str, Any]:
    """The values with which each training must end."""
    ends = run_ranks(RANKS, train, folder, folder, NONE, "consolidated", joined=False)
    assert [end.exitcode for end in ends] == [0] * RANKS, ends[0].said[-4000:]
    found: dict[str, Any] = ends[0].result
    return found


def inject(fault: Fault, folder: Path, wanted: dict[str, Any]) -> Outcome:
    """Train with a fault, check what it has left, and resume."""
    hung = fault.kind in HANGS
    ends = run_ranks(RANKS, train, folder, folder, fault, fault.checkpoint, joined=False)
    if not (folder / "fault").exists():
        return Outcome(fault, 0, ["it did not happen", *(end.said[-1000:] for end in ends)])
    began = float((folder / "fault").read_text())
    others = [(rank, end) for rank, end in enumerate(ends) if rank != fault.rank]
    seconds = max(end.at for _, end in others) - began
    wrong = [text for rank, end in others for text in _judged(fault, rank, end)]
    if seconds > (HUNG_FOR if hung else ENDED_IN):
        wrong.append(f"the others ended after {seconds:.1f} s")
    if ends[fault.rank].exitcode is None and fault.kind != "stop":
        wrong.append("the rank itself is left")
    wrong += _damaged(folder / "checkpoints")
    none = replace(NONE, behind=fault.behind)
    again = run_ranks(RANKS, train, folder, folder, none, fault.checkpoint, joined=False)
    for rank, end in enumerate(again):
        if end.exitcode or not isinstance(end.result, dict):
            wrong.append(f"after it rank {rank} did not train: {end.said[-1000:]}")
        elif not equal(end.result["values"], wanted["values"]) or end.result["steps"] != wanted["steps"]:
            wrong.append(f"after it rank {rank} ended with other values")
    return Outcome(fault, seconds, wrong)


def _judged(fault: Fault, rank: int, end: Ended) -> list[str]:
    if end.exitcode is None:
        return [f"rank {rank} hangs"]
    who = f"rank {fault.rank}: "
    if not any(
        words + who in end.said
        for words in ("irst process to fail was ", "says: PiperError: ", "says: CaptureError: ", "failed on ")
    ):
        return [f"rank {rank} does not name rank {fault.rank}: {end.said[-2500:]}"]
    if fault.kind == "memory" and "MemoryError" not in end.said:
        return [f"rank {rank} does not say that memory was short: {end.said[-2500:]}"]
    return []


def _damaged(folder: Path) -> list[str]:
    wrong = []
    for path in folder.glob("*.ckpt"):
        try:
            if path.is_dir():
                folder = LocalFolder(path)
                files = read_manifest(folder)["files"]
                verify(folder, files, files)
            else:
                torch.load(path, weights_only=True)
        except Exception as error:
            wrong.append(f"{path.name} is damaged: {error}")
    return wrong
