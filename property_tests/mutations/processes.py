"""Two real processes, joined by gloo, that train under seeded bugs which only they have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_piper.ir.build import metric_names
from lightning_piper.runtime import Executor, ProcessTransport
from lightning_piper.verify import interpret
from property_tests.mutations import layers
from property_tests.mutations.drivers import IN_PROCESSES
from property_tests.mutations.scenarios import SCENARIOS, batches
from property_tests.mutations.table import Seeded
from tests.distributed.processes import LIMIT

SCENARIO = SCENARIOS["convolution"]  # its stages hand on a tensor that lies transposed in memory
DELAY = 0.05  # of one process, so that what does not wait is too early


@dataclass(frozen=True)
class Ran:
    """One process's metrics and gradients of a step, and how often the bug did wrong."""

    metrics: torch.Tensor
    grads: dict[str, torch.Tensor]
    hits: int


def run(rank: int, names: Sequence[str | None]) -> list[Ran | Exception]:
    """A step of this process under each mutation; None is none."""
    built = layers.static(SCENARIO)
    leaves = batches(SCENARIO.spec, SCENARIO.size, 1)[0]
    results: list[Ran | Exception] = []
    for name in names:
        with contextlib.nullcontext(Seeded()) if name is None else IN_PROCESSES[name].patch() as seeded:
            transport = ProcessTransport(built.plans, range(dist.get_world_size()), layers.CPU, timeout=LIMIT)
            buffers = {n: built.case.tensors[n].clone() for n in built.case.step.buffers}
            executor = Executor(built.plans[rank], built.case.step, built.case.tensors, buffers, transport, layers.CPU)
            if rank == 0:
                time.sleep(DELAY)
            try:
                result = executor.step(leaves, seed=0)
                results.append(Ran(result.metrics, result.grads, seeded.hits))
            except Exception as error:
                results.append(error)
            dist.barrier()
            transport.close()
    return results


def compare(ranks: Sequence[Ran | Exception]) -> None:
    """Hold what the processes have against the interpreter."""
    built = layers.static(SCENARIO)
    leaves = batches(SCENARIO.spec, SCENARIO.size, 1)[0]
    outcome = interpret(built.dag, built.case.tensors, leaves)
    expected = torch.stack([outcome.metrics[name] for name in metric_names(built.dag.code)])
    for rank, ran in enumerate(ranks):
        if isinstance(ran, Exception):
            raise ran
        for name, grad in ran.grads.items():
            assert torch.equal(grad, outcome.grads[name]), f"rank {rank}: gradient {name} differs"
        assert torch.equal(ran.metrics, expected), f"rank {rank}: metrics differ"
