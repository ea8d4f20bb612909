"""A script that trains PP2 x DP2 with sharded parameters on four processes, and writes what each process ended with. Its second
argument is the number of nodes.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

import lightning_piper as piper
from lightning_piper.directives import Replicate
from tests.strategy.fitting import trainer, values
from tests.strategy.models import make

GROUPS = [[0, 2], [1, 3]]
PROGRAM = [
    *piper.schedules.one_f_one_b(stages=2, microbatches=2, devices=GROUPS),
    Replicate(filter={}, devices=GROUPS, shard_params=True),
]


def train(nodes: int) -> dict[str, torch.Tensor]:
    """Five steps; losses, and the whole module afterwards."""
    module, loader = make("mlp", samples=40, batch_size=4)
    strategy = piper.PiperStrategy(PROGRAM, timeout=timedelta(seconds=60))
    fit, record = trainer(strategy, devices=4 // nodes, num_nodes=nodes)
    torch.manual_seed(9)
    fit.fit(module, loader)
    return values(module) | {"losses": torch.tensor(record.losses, dtype=torch.float64)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[2])
    result = train(count)
    rank = 4 // count * int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0))) + int(os.environ["LOCAL_RANK"])
    torch.save(result, Path(sys.argv[1]) / f"rank{rank}.pt")
