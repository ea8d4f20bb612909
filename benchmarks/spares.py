"""Measures how long a training stops when it loses a process and a spare replaces it, and what the copies in memory
cost.

The training is a GPT on two processes, as replicas. Process 1 is lost after step 25.

    python benchmarks/spares.py [--layers 8] [--sequences 4]

Prints the seconds from the loss until the fit runs again, and until the next step is done. Then prints the median
seconds of a step, with and without a spare.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from resuming import LOST_AT, STEPS, Net
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper


class Telling(L.Callback):
    """Logs the time of events, and kills process 1 once."""

    def __init__(self, log: Path, kills: bool) -> None:
        self.told, self.kills = log, kills and "LIGHTNING_PIPER_SPARE" not in os.environ

    def tell(self, what: str, trainer: L.Trainer) -> None:
        with self.told.open("a") as file:
            file.write(json.dumps([time.time(), what, trainer.global_rank, trainer.global_step]) + "\n")

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.tell("begins", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.tell("step", trainer)
        if self.kills and trainer.global_rank == 1 and trainer.global_step == LOST_AT:
            self.tell("lost", trainer)
            os.kill(os.getpid(), signal.SIGKILL)


def train(log: Path, spares: int, layers: int, sequences: int) -> None:
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(*batch(Config(), 0, 2 * sequences * STEPS)), batch_size=sequences)
    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=piper.PiperStrategy(spares=spares),
        max_steps=STEPS,
        callbacks=[Telling(log, spares > 0)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Net(layers), data)


def measured(spares: int, layers: int, sequences: int) -> list[tuple[float, str, int, int]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        own = ["--log", log, "--spares", spares, "--layers", layers, "--sequences", sequences]
        command = [sys.executable, __file__, *map(str, own)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in log.read_text().splitlines()]


def step_seconds(log: list[tuple[float, str, int, int]]) -> float:
    """Return the median time from one step to the next, of the steps before the loss."""
    ends = [at for at, what, rank, step in log if what == "step" and rank == 0 and 5 <= step < LOST_AT]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a process in a step")
    parser.add_argument("--log", help=argparse.SUPPRESS)
    parser.add_argument("--spares", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.log:
        train(Path(given.log), given.spares, given.layers, given.sequences)
        return
    log = measured(1, given.layers, given.sequences)
    lost = next(at for at, what, *_ in log if what == "lost")
    begins = max(at for at, what, *_ in log if what == "begins") - lost
    again = [at for at, what, rank, step in log if what == "step" and rank == 1 and at > lost]
    print(f"begins again after {begins:.2f} s, next step done after {again[0] - lost:.2f} s", flush=True)
    plain = measured(0, given.layers, given.sequences)
    print(f"a step takes {step_seconds(log):.3f} s with copies, and {step_seconds(plain):.3f} s without")


if __name__ == "__main__":
    main()
