"""Measures how long a training stops when it loses a process and a spare replaces it, and what the copies in memory
cost.

The training is a GPT on two processes. Process 1 is lost after step 60. Until then, every second step makes copies. Without
this benchmark, Piper makes copies so rarely that they take at most 3 % of the time.

    python benchmarks/spares.py [--program ddp] [--layers 8] [--sequences 4]

Prints the seconds from the loss until the fit runs again, and until the next step is done. Then prints the median seconds
of a step with and without copies: processor time of all threads of a process, and wall time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from _gpt import Config, batch
from resuming import Net
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.checkpoint import memory_copy

LOST_AT, STEPS = 60, 64


class Telling(L.Callback):
    """Logs the time of events, and kills process 1 once."""

    def __init__(self, log: Path) -> None:
        self.told, self.kills = log, "LIGHTNING_PIPER_SPARE" not in os.environ

    def tell(self, what: str, trainer: L.Trainer) -> None:
        now = time.time(), time.process_time()
        with self.told.open("a") as file:
            file.write(json.dumps([*now, what, trainer.global_rank, trainer.global_step]) + "\n")

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.tell("begins", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.tell("step", trainer)
        if self.kills and trainer.global_rank == 1 and trainer.global_step == LOST_AT:
            self.tell("lost", trainer)
            os.kill(os.getpid(), signal.SIGKILL)


Event = tuple[float, float, str, int, int]  # wall time, processor time, name, rank, step


def train(log: Path, program: str, layers: int, sequences: int) -> None:
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(*batch(Config(), 0, 2 * sequences * STEPS)), batch_size=sequences)
    memory_copy.SHARE = math.inf  # copies may take any part of the time
    strategy = piper.PiperStrategy(program, spares=1)
    keep = strategy._keep_copy

    def every_second(trainer: L.Trainer) -> None:
        if trainer.global_step % 2:
            keep(trainer)

    vars(strategy)["_keep_copy"] = every_second
    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[Telling(log)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Net(layers), data)


def measured(program: str, layers: int, sequences: int) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        own = ["--log", log, "--program", program, "--layers", layers, "--sequences", sequences]
        command = [sys.executable, __file__, *map(str, own)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in log.read_text().splitlines()]


def step_seconds(log: list[Event], copies: bool) -> tuple[float, float]:
    """Return the median wall time and processor time of the steps before the loss, with or without copies."""
    ends = [row for row in log if row[2] == "step" and row[3] == 0 and 5 <= row[4] <= LOST_AT]
    found = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(ends)
        if (before[4] % 2 == 1) == copies
    ]
    return statistics.median(wall for wall, _ in found), statistics.median(used for _, used in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a process in a step")
    parser.add_argument("--log", help=argparse.SUPPRESS)
    parser.add_argument("--program", default="ddp")
    given = parser.parse_args()
    if given.log:
        train(Path(given.log), given.program, given.layers, given.sequences)
        return
    log = measured(given.program, given.layers, given.sequences)
    lost = next(at for at, _, what, *_ in log if what == "lost")
    begins = max(at for at, _, what, *_ in log if what == "begins") - lost
    again = [at for at, _, what, rank, _ in log if what == "step" and rank == 1 and at > lost]
    print(f"begins again after {begins:.2f} s, next step done after {again[0] - lost:.2f} s")
    for copies in (False, True):
        wall, used = step_seconds(log, copies)
        words = "with" if copies else "without"
        print(f"a step {words} copies: {used:.4f} s of processor time, {wall:.4f} s of wall time")


if __name__ == "__main__":
    main()
