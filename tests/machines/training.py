"""What a rank on one of two hosts does, as a script: it trains a decoder in float64, by each of the programs that its
arguments name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.directives import Place, Replicate
from lightning_piper.runtime import process
from lightning_piper.runtime.same_machine.shared_memory import SharedMessages, messages_of
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET, traced_once
from tests.tensors import Decoder, decoder, divided, stages, tensors

SAMPLES, BATCH = 48, 8
# Name -> (options of the strategy, number of processes that draw batches of their own). Ranks 0 and 1 are on the
# first host. Activations of the pipeline and of tensor parallelism travel between the hosts.
PROGRAMS: dict[str, tuple[dict[str, Any], int]] = {
    "pp2 dp2": ({"directives": [*stages([[0, 1], [2, 3]]), Replicate([[0, 1], [2, 3]])]}, 2),
    "zero3": ({"dp": 4, "zero": 3}, 4),
    "tp2": (
        {
            "directives": [
                Place(filter={}, devices=[[0, 2], [1, 3]], axes=["data", "tp"]),
                divided(None),
                Replicate(filter={}, devices=[0, 2, 1, 3]),
            ]
        },
        2,
    ),
    "auto": ({"directives": "auto", "whole": False}, 4),
}


@traced_once
def fit(
    strategy: Any, replica: int = 0, replicas: int = 1, steps: int = 8, **options: Any
) -> tuple[L.Trainer, Decoder]:
    """Train for some steps, the last two of eight in a second epoch. Each replica draws its part of each batch."""
    module, data = decoder(), TensorDataset(*(x[replica::replicas] for x in tensors(SAMPLES)))
    about: dict[str, Any] = QUIET | {"use_distributed_sampler": False, "precision": "64-true"} | options
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, **about)
    trainer.fit(module, DataLoader(data, batch_size=BATCH // replicas))
    return trainer, module


def train(folder: Path, names: list[str]) -> None:
    """Train by each program. Rank 0 writes what was trained, and each rank which groups have shared memory, and how
    many processes are on its machine.
    """
    for name in names:
        options, replicas = PROGRAMS[name]
        shared: dict[tuple[int, ...], bool] = {}

        def noted(group: Any, timeout: Any, shared: dict[tuple[int, ...], bool] = shared) -> Any:
            messages = messages_of(group, timeout)
            shared[tuple(dist.get_process_group_ranks(group))] = isinstance(messages, SharedMessages)
            return messages

        strategy = piper.PiperStrategy(timeout=PATIENCE, **options)
        with mock.patch.object(process, "messages_of", noted):
            trainer, _ = fit(strategy, int(os.environ["RANK"]) % replicas, replicas, devices=2, num_nodes=2)
            trainer.save_checkpoint(folder / f"{name}.ckpt")
        _, neighbors = strategy.world.on_this_machine()
        torch.save((shared, neighbors), folder / f"{name}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2:])
