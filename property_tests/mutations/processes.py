"""Two real processes, joined by gloo, that train under seeded bugs which only they have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_piper.ir.values import flattened
from lightning_piper.ops.metrics import metric_names
from lightning_piper.runtime import Executor, ProcessTransport, shards_of
from lightning_piper.verify import interpret
from property_tests.mutations import drivers, layers, shards
from property_tests.mutations.scenarios import SCENARIOS, Scenario, batches
from property_tests.mutations.table import TABLE, Mutation, Seeded
from tests.distributed.processes import LIMIT

FILES = (drivers, shards)  # what fills the table with mutations that only processes show
IN_PROCESSES = {name: entry for name, entry in TABLE.items() if entry.processes}
DEFAULT = "convolution"  # its stages hand on a tensor that lies transposed in memory
DELAY = 0.05  # of one process, so that what does not wait is too early


@dataclass(frozen=True)
class Ran:
    """One process's metrics and gradients of a step, and how often the bug did wrong."""

    metrics: torch.Tensor
    grads: dict[str, torch.Tensor]
    hits: int


def scenario_of(mutation: Mutation) -> Scenario:
    return SCENARIOS[mutation.scenario or DEFAULT]


def controls() -> list[str]:
    """The scenarios of these mutations."""
    return sorted({scenario_of(entry).name for entry in IN_PROCESSES.values()})


def run(rank: int, names: Sequence[str]) -> list[Ran | Exception]:
    """A step of this process under each mutation; under the name of a scenario, without any."""
    results: list[Ran | Exception] = []
    for name in names:
        scenario = SCENARIOS[name] if name in SCENARIOS else scenario_of(IN_PROCESSES[name])
        built = layers.static(scenario)
        plan, leaves = built.plans[rank], batches(scenario.spec, scenario.size, 1)[0]
        with contextlib.nullcontext(Seeded()) if name in SCENARIOS else IN_PROCESSES[name].patch() as seeded:
            transport = ProcessTransport(built.plans, range(dist.get_world_size()), layers.CPU, timeout=LIMIT)
            buffers = {n: built.case.tensors[n].clone() for n in built.case.step.buffers}
            shards = layers.poisoned(plan, shards_of(plan, built.case.tensors, layers.CPU))
            params = layers.whole_params(plan, built.case.tensors)
            executor = Executor(plan, built.case.step, params, buffers, transport, layers.CPU, shards)
            local_batch = [
                x.narrow(0, plan.replica * plan.local_batch_size, plan.local_batch_size) if x.ndim else x
                for x in leaves
            ]
            if rank == 0:
                time.sleep(DELAY)
            try:
                result = executor.step(local_batch, seed=0)
                results.append(Ran(result.metrics, result.grads, seeded.hits))
            except Exception as error:
                results.append(error)
            dist.barrier()
            transport.close()
    return results


def compare(scenario: Scenario, ranks: Sequence[Ran | Exception]) -> None:
    """Hold what the processes have against the interpreter."""
    built = layers.static(scenario)
    outcome = interpret(built.dag, built.case.tensors, batches(scenario.spec, scenario.size, 1)[0])
    expected = torch.stack([outcome.metrics[name] for name in metric_names(built.dag.code)])
    for rank, ran in enumerate(ranks):
        if isinstance(ran, Exception):
            raise ran
        plan = built.plans[rank]
        pieces = {
            name: (bucket.wholes[bucket.names.index(name)], slice(start, stop))
            for bucket in plan.shards
            for name, start, stop, _ in bucket.local_shards(plan.replica)
        }
        for name, grad in ran.grads.items():
            right = outcome.grads[name]
            if name in pieces:
                spec, part = pieces[name]
                right = flattened(right, spec)[part]
            assert torch.equal(grad, right), f"rank {rank}: gradient {name} differs"
        assert torch.equal(ran.metrics, expected), f"rank {rank}: metrics differ"
