"""Trainings of PP2 x DP2 on four processes, with sharded parameters and with whole ones. As a script, whose
second argument is the number of nodes, each process writes the values with which it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

import lightning_piper as piper
from lightning_piper.directives import Replicate
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import sharing_captures, trainer, values
from tests.strategy.models import make

GROUPS = [[0, 2], [1, 3]]


@sharing_captures
def fit(nodes: int, sharded: bool) -> dict[str, torch.Tensor]:
    """Train for seven steps, of which the last ones belong to a second epoch. Returns the losses and the
    parameters of the whole module.
    """
    program = [
        *piper.schedules.one_f_one_b(stages=2, microbatches=2, devices=GROUPS),
        Replicate(filter={}, devices=GROUPS, shard_params=sharded),
    ]
    module, loader = make("mlp", samples=44, batch_size=4)
    strategy = piper.PiperStrategy(program, timeout=PATIENCE)
    fit, record = trainer(strategy, devices=4 // nodes, num_nodes=nodes, max_steps=7)
    torch.manual_seed(9)
    fit.fit(module, loader)
    return values(module) | {"losses": torch.tensor(record.losses, dtype=torch.float64)}


def train(rank: int, nodes: int) -> list[dict[str, torch.Tensor]]:
    return [fit(nodes, sharded) for sharded in (True, False)]


def train_in_torchrun(rank: int) -> list[dict[str, torch.Tensor]]:
    """Train as one of four processes of a node that torchrun starts."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "1234", "RANK": str(rank), "GROUP_RANK": "0"}
    assert TorchElasticEnvironment.detect()
    return train(rank, 1)


def train_in_slurm(rank: int) -> list[dict[str, torch.Tensor]]:
    """Train as the task of this rank in a SLURM job with two tasks on each of two nodes. Both nodes are this
    machine.
    """
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    os.environ |= {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": str(rank // 2),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
    }
    assert SLURMEnvironment.detect()
    return train(rank, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[2])
    rank = 4 // count * int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0))) + int(
        os.environ.get("LOCAL_RANK", 0)
    )
    torch.save(train(rank, count), Path(sys.argv[1]) / f"rank{rank}.pt")
