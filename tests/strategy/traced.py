"""What trainings on processes trace of the zoo, traced when this is imported: by the server that the
processes are forked from, so that it is done once, and not by every rank of every launch.
"""

from __future__ import annotations

import torch

from tests.strategy.fitting import PROGRAM, local, sharing_captures, trainer
from tests.strategy.models import make
from tests.strategy.resumed import replicas


@sharing_captures
def trace() -> None:
    """Of batches of eight samples: what four microbatches need, and two replicas of two microbatches."""
    for program, names in (
        (PROGRAM, ["mlp", "dropout", "tied", "conv", "varied"]),
        (replicas(), ["mlp", "dropout", "tied", "varied"]),
    ):
        for name in names:
            module, loader = make(name)
            fit, _ = trainer(local(program), max_steps=1)
            fit.fit(module, loader)


torch.set_num_threads(1)  # a process with threads must not be forked
with torch.random.fork_rng():
    trace()
