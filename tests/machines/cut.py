"""What a rank does until something happens, as a script: it trains without an end and says what ends it, or one rank is
slow for longer than a machine may be silent.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch

import lightning_piper as piper
from lightning_piper.processes import reachability
from tests.machines import training


class Happens(L.Callback):
    """After the third batch, rank 0 writes to the file `begun`, or does nothing for a long time (`slow`)."""

    def __init__(self, slow: bool, begun: str) -> None:
        self.slow, self.begun = slow, begun

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 0:
            if self.slow:
                # No other thread of this process can run Python code meanwhile.
                ctypes.PyDLL(None).sleep(int(2 * reachability.LOST))
            else:
                with open(self.begun, "w") as file:
                    file.write("begun")


def train(name: str, slow: bool, begun: str) -> None:
    options, replicas = training.PROGRAMS[name]
    strategy = piper.PiperStrategy(timeout=timedelta(minutes=30), **options)
    rank = int(os.environ["RANK"])
    try:
        training.fit(
            strategy,
            rank % replicas,
            replicas,
            steps=6 if slow else -1,
            max_epochs=-1,
            devices=2,
            num_nodes=2,
            callbacks=[Happens(slow, begun)],
        )
    except Exception as error:
        print(f"at {time.time()} rank {rank} says: {type(error).__name__}: {error}", flush=True)
        raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], sys.argv[2] == "slow", sys.argv[3])
