"""Traces, when it is imported, the models of the zoo that trainings on processes use. The server from which
the processes are forked imports it, so that each model is traced once instead of by every rank of every
launch.
"""

from __future__ import annotations

import torch

from tests.strategy.fitting import PROGRAM, local, sharing_captures, trainer
from tests.strategy.models import make
from tests.strategy.resumed import replicas


@sharing_captures
def trace() -> None:
    """Trace batches of eight samples, for four microbatches and for two replicas of two microbatches."""
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
