"""A training on two processes in which one of them fails. Lightning's launcher starts it as a script."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch

import lightning_piper as piper
from lightning_piper.processes import failure
from lightning_piper.runtime.same_machine import shared_memory
from tests.distributed.processes import LIMIT
from tests.strategy.fitting import PROGRAM, Batches, trainer
from tests.strategy.models import MLP, vectors
from tests.strategy.replicated import dp2


def terminate_once() -> None:
    """Send SIGTERM to this process in the first call. A capture calls a layer more than once, and notices changes of
    Python's state, so the priority of the process tells whether the signal was sent."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 5:
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        os.kill(os.getpid(), signal.SIGTERM)


class Trouble(L.Callback):
    """What happens in the third batch, and on which rank: "die on 0, hang on 1"; or at its end: "leave on 1";
    or before the first one: "begin on 1".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.kind == f"begin on {trainer.global_rank}":
            raise ValueError("something of the user's")

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.kind == "term while waiting on 0":
            if trainer.global_rank == 0:
                threading.Thread(target=term_when_waiting, args=(threading.get_ident(),), daemon=True).start()
            else:
                module.first.register_forward_pre_hook(lambda *args: time.sleep(1000))
        if self.kind == f"term at first on {trainer.global_rank}":
            module.first.register_forward_pre_hook(lambda *args: terminate_once())

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for trouble in self.kind.split(", ") if batch_idx == 2 else []:
            if trouble in (f"raise on {trainer.global_rank}", f"live on {trainer.global_rank}"):
                raise ValueError("something of the user's")
            if trouble == f"die on {trainer.global_rank}":
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble == f"stop on {trainer.global_rank}":
                os.kill(os.getpid(), signal.SIGSTOP)
            if trouble == f"term on {trainer.global_rank}":
                os.kill(os.getpid(), signal.SIGTERM)
            if trouble == f"hang on {trainer.global_rank}":
                time.sleep(1000)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        print(f"rank {trainer.global_rank} trained batch {batch_idx}", flush=True)
        trainer.should_stop |= batch_idx == 2 and self.kind == f"leave on {trainer.global_rank}"


def term_when_waiting(thread: int) -> None:
    while not failure.place_of(thread)["waits"]:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def data(kind: str) -> Any:
    batches = list(vectors())
    if kind.startswith("other shapes") and os.environ.get("LOCAL_RANK") == "1":
        # The step is not traced again for this batch, so no rank waits for the comparison of all ranks.
        batches[3] = [x[:6] for x in batches[3]]
    if kind == f"end on {os.environ.get('LOCAL_RANK')}":
        del batches[2:]
    return Batches(batches)


def train(rank: int, kind: str, devices: int = 2) -> None:
    main(kind, devices)


def main(kind: str, devices: int = 2) -> None:
    replicas = "replicas" in kind or kind[:-2] in ("end on", "leave on")
    program: Any = [] if devices == 1 else dp2() if replicas else list(PROGRAM)
    # So long that a rank which is only slow on a busy machine is not taken for one that hangs.
    failure.GRACE = failure.SETTLE = 20.0
    failure.PATIENCE = 100.0
    failure.EVERY = 0.5
    # The timeout also limits how much later one process may start than the other, which takes long with
    # Lightning's launcher.
    seconds = {"hang on 0": 20, "stop on 1": 60}.get(kind, 2 * LIMIT.total_seconds())
    strategy = piper.PiperStrategy(program, timeout=timedelta(seconds=seconds))
    options = {"max_steps": -1, "max_epochs": 1} if kind.startswith("end") else {}
    fit, _ = trainer(strategy, [Trouble(kind)], devices=devices, **options)
    try:
        fit.fit(MLP(), data(kind))
    except Exception as error:
        print(
            f"rank {fit.global_rank} says: {type(error).__name__}: {error}",
            *getattr(error, "__notes__", []),
            flush=True,
        )
        if kind == f"live on {fit.global_rank}":
            time.sleep(1000)
        raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["over gloo"]:
        shared_memory.READERS = 0  # no communicator is small enough for memory
    main(sys.argv[1])
