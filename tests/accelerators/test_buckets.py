"""The memory of buckets on a device that is slower than its host: at most the memory on a device that keeps
up with its host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import eliminate
from lightning_piper.plan import Plan, check_plans, compile_plans
from lightning_piper.plan.instructions import (
    AllGatherInstruction,
    Collective,
    Instruction,
    Record,
    ReduceScatterInstruction,
    WaitEvent,
    WaitWork,
)
from lightning_piper.plan.streams import add_events
from lightning_piper.runtime import Executor, StepResult, shards_of
from lightning_piper.runtime.simulated_transport import SimulatedTransport, samples_of
from lightning_piper.simulate import simulate
from lightning_piper.testing.simulated import Batch, first_difference
from tests.plan.programs import dag_of, split

CPU = torch.device("cpu")
LAYERS, WIDTH, SIZE = 6, 32, 4
BUCKET = WIDTH * WIDTH * 4  # bytes of a layer; outputs of passes are much smaller
LEVELS = ("shard_params", "shard_grads")
REPORTED = 64  # bytes that suffice for the sum of the reported values
ORDERS = range(6)


class Chain(L.LightningModule):
    """A chain with one bucket for each region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("PP", i):
                batch = torch.tanh(layer(batch))
        return batch.square().mean()


@functools.cache
def program(
    level: str, dtype: str | None = None
) -> tuple[TrainingDAG, Mapping[int, Plan], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return a program of two replicas, in two microbatches."""
    module, batch = Chain(), torch.linspace(-1, 1, SIZE * WIDTH).view(SIZE, WIDTH)
    step = capture(module, batch)
    replicate = {"op": "replicate", "filter": {}, "devices": [0, 1], level: True, "gather_dtype": dtype}
    dag = dag_of(step, [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(2), replicate])
    eliminate(dag)
    return (
        dag,
        dict(compile_plans(dag)),
        {step.canonical[n]: x.detach() for n, x in module.named_parameters()},
        [batch],
    )


def apart(plan: Plan, kind: type[Collective]) -> Plan:
    """Return the plan with its collectives of one kind on a stream of their own, and with the events that
    they then need. The numbers stay the same.
    """
    own = {x.node: x.communicator for x in plan.instructions if isinstance(x, kind)}
    moved: list[Instruction] = []
    for x in plan.instructions:
        if isinstance(x, Collective | WaitWork) and x.node in own:
            moved.append(dataclasses.replace(x, stream=own[x.node]))
        elif not isinstance(x, Record | WaitEvent):
            moved.append(x)
    instructions, events = add_events(moved)
    return dataclasses.replace(plan, instructions=tuple(instructions), events=events)


def most(level: str, plans: Mapping[int, Plan], order: int) -> int:
    """Return the most bytes that the first device holds in a step, in addition to the bytes before the step.
    Its host waits for nothing, so at the end the device has not run anything, and the other device has not
    begun.
    """
    dag, _, held, leaves = program(level)
    found: list[int] = []
    with Simulated(order) as simulated:
        transport, memory = SimulatedTransport(simulated, plans), simulated.memory

        def step(d: int) -> StepResult:
            plan, tensors = plans[d], {name: x.clone() for name, x in held.items()}
            executor = Executor(plan, dag.step, tensors, {}, transport, CPU, shards_of(plan, tensors, CPU))
            simulated.wait_for_current()
            before = memory.most = memory.held
            result = executor.step(samples_of(plan, leaves), seed=0)
            found.append(memory.most - before)
            return result

        transport.run({d: functools.partial(step, d) for d in plans})
    return found[0]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_host_that_is_far_ahead_takes_no_more_memory(level: str, dtype: str | None) -> None:
    """As much as the values of the plan need, in its order; beside what the sum of what is reported lies
    on.
    """
    dag, plans, held, leaves = program(level, dtype)
    check_plans(plans)
    needed = simulate(dag, plans).devices[0].peak_bytes
    assert all(needed - BUCKET < most(level, plans, order) < needed + REPORTED for order in ORDERS)
    assert first_difference([Batch(dag, plans, leaves)] * 2, held, ORDERS) is None


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        ("shard_params", AllGatherInstruction),
        ("shard_params", ReduceScatterInstruction),
        ("shard_grads", ReduceScatterInstruction),
    ],
)
def test_on_streams_of_their_own_buckets_pile_up_and_the_check_says_so(
    level: str, kind: type[Collective]
) -> None:
    """Nothing waits for what reads a bucket last: a device that falls behind has them all. The numbers are
    right.
    """
    dag, plans, held, leaves = program(level)
    other = {d: apart(plan, kind) for d, plan in plans.items()}
    needed = simulate(dag, other).devices[0].peak_bytes
    assert all(most(level, other, order) > needed + 2 * LAYERS * BUCKET for order in ORDERS)
    assert first_difference([Batch(dag, other, leaves)] * 2, held, ORDERS) is None
    with pytest.raises(VerificationError, match=r"the next (gather|bucket) does not wait for its memory"):
        check_plans(other)


def test_a_sum_is_waited_for_where_it_was_started() -> None:
    """What it reads is kept until then, and goes back to the stream that started it."""
    _, plans, _, _ = program("shard_grads")
    plan = plans[0]
    node = next(x.node for x in plan.instructions if isinstance(x, ReduceScatterInstruction))
    moved = [dataclasses.replace(x, stream="elsewhere") if isinstance(x, WaitWork) and x.node == node else x
             for x in plan.instructions if not isinstance(x, Record | WaitEvent)]  # fmt: skip
    instructions, events = add_events(moved)
    with pytest.raises(
        VerificationError, match="it is waited for on stream elsewhere; stream compute started it"
    ):
        check_plans({**plans, 0: dataclasses.replace(plan, instructions=tuple(instructions), events=events)})
