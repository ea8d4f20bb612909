"""Compares plans on a simulated accelerator, in random orders, with the same plans on the CPU, bit by bit.

An example::

    batches = [Batch(dag, plans, leaves)] * 2
    assert first_difference(batches, tensors, range(100)) is None
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from lightning_piper.accelerators.simulated_device import QUEUES, Simulated
from lightning_piper.errors import PiperError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime import (
    Executor,
    GradientBuffer,
    LocalTransport,
    StepResult,
    local_shards_of,
    run_local,
    shards_of,
)
from lightning_piper.runtime.simulated_transport import SimulatedTransport, samples_of
from lightning_piper.runtime.transport import Transport

Over = Literal["devices", "one device"]
Values = Mapping[str, torch.Tensor]  # name of a parameter, buffer or result -> value
CPU = torch.device("cpu")
# The factor of parameter updates between steps, so that stale values of one step differ from the next step's.
RATE = 1 / 64


@dataclass(frozen=True)
class Batch:
    """A step with its plans.

    Attributes:
        dag: The finished DAG.
        plans: The plans of its devices.
        leaves: The global batch.
        last: Whether it is the last batch of an accumulation. The parameters change after it.
    """

    dag: TrainingDAG
    plans: Mapping[int, Plan]
    leaves: Sequence[torch.Tensor]
    last: bool = True


@dataclass
class _Device:
    """The values that one device holds, and its results.

    Attributes:
        tensors: Parameters and buffers by name.
        shards: This device's shards of buckets.
        kept: Gradients that are accumulated over batches.
        found: The result of each step.
        cuda_graphs: Whether the device's executors capture passes into graphs.
    """

    tensors: dict[str, torch.Tensor]
    shards: dict[Bucket, torch.Tensor] = field(default_factory=dict)
    kept: GradientBuffer = field(default_factory=dict)
    found: list[StepResult] = field(default_factory=list)
    cuda_graphs: bool = False

    def executor(self, batch: Batch, plan: Plan, transport: Transport) -> Executor:
        return Executor(
            plan,
            batch.dag.step,
            self.tensors,
            self.tensors,
            transport,
            CPU,
            self.shards,
            self.kept,
            cuda_graphs=self.cuda_graphs,
        )

    def after(self, batch: Batch, plan: Plan, result: StepResult) -> None:
        """Store a step's result, and update the parameters as an optimizer does, on the caller's stream."""
        self.found.append(result)
        held = self.tensors | local_shards_of(plan, self.shards)
        for name, grad in result.grads.items() if batch.last else ():
            held[name].sub_(grad.view(held[name].shape).to(held[name].dtype), alpha=RATE)

    def values(self) -> Values:
        found = dict(self.tensors)
        for i, result in enumerate(self.found):
            made = {"metrics": result.metrics, **result.grads, **result.results}
            found |= {f"{name} of step {i}": x for name, x in made.items()}
        return found


def run_steps(
    batches: Sequence[Batch],
    tensors: Values,
    order: int | None,
    over: Over = "devices",
    queues: int = QUEUES,
    cuda_graphs: bool = False,
) -> list[Values]:
    """Return each device's values after steps with these batches, by ascending device.

    The values are, by name, the final parameters and buffers, and the gradients, results and metrics of each
    step (`"metrics of step 0"`).

    Args:
        batches: The batches. Batches with the same plans share executors. Accumulated gradients pass from one
            batch to the next.
        tensors: Parameters and buffers. Each device gets a copy.
        order: Number of the random order in which the simulated accelerator works. None: run on the CPU.
        over: With `devices`, each device has streams and memory of its own and communicates as with NCCL.
            With `one device`, all plans run on one device and pass tensors directly.
        queues: The number of queues of a device.
        cuda_graphs: Whether executors on the simulated accelerator capture passes into graphs after the first step, and
            replay them in later steps (default: no).

    Raises:
        ExecutionError: Queues wait for each other, or an operation used memory that was already reused.
    """
    graphs = cuda_graphs and order is not None
    devices = {
        d: _Device({n: x.clone() for n, x in tensors.items()}, cuda_graphs=graphs)
        for d in sorted(batches[0].plans)
    }
    if order is None:
        _on_one(batches, devices)
        return [device.values() for device in devices.values()]
    with Simulated(order, queues) as simulated:
        if over == "devices":
            _on_many(simulated, batches, devices)
        else:
            _on_one(batches, devices)
        simulated.synchronize()
    return [device.values() for device in devices.values()]


def _on_one(batches: Sequence[Batch], devices: Mapping[int, _Device]) -> None:
    """Run batches with all devices in one thread."""
    for d, device in devices.items():
        device.shards = shards_of(batches[0].plans[d], device.tensors, CPU)
    executors: dict[int, list[Executor]] = {}
    for seed, batch in enumerate(batches):
        if id(batch.plans) not in executors:
            transport = LocalTransport(batch.plans)
            executors[id(batch.plans)] = [
                devices[d].executor(batch, batch.plans[d], transport) for d in devices
            ]
        results = run_local(executors[id(batch.plans)], batch.leaves, seed, last=batch.last)
        for d, result in zip(devices, results, strict=True):
            devices[d].after(batch, batch.plans[d], result)


def _on_many(simulated: Simulated, batches: Sequence[Batch], devices: Mapping[int, _Device]) -> None:
    """Run batches with each device on a simulated accelerator of its own."""
    transport = SimulatedTransport(simulated, batches[0].plans)
    for batch in batches:
        transport.connect(batch.plans)

    def program(d: int) -> None:
        """Run the steps of device `d`, in the device's own thread."""
        device = devices[d]
        device.shards = shards_of(batches[0].plans[d], device.tensors, CPU)
        executors: dict[int, Executor] = {}
        for seed, batch in enumerate(batches):
            plan = batch.plans[d]
            if id(batch.plans) not in executors:
                executors[id(batch.plans)] = device.executor(batch, plan, transport)
            result = executors[id(batch.plans)].step(samples_of(plan, batch.leaves), seed, last=batch.last)
            device.after(batch, plan, result)

    transport.run({d: partial(program, d) for d in devices})


def differences(expected: Sequence[Values], found: Sequence[Values]) -> list[str]:
    """Return a text for each value whose bits differ, such as "device 1: fc.weight". The device is the index
    in `expected`. Empty if all bits are the same."""
    return [
        f"device {d}: {name}"
        for d, (a, b) in enumerate(zip(expected, found, strict=True))
        for name in a
        if not torch.equal(
            a[name].contiguous().view(-1).view(torch.uint8), b[name].contiguous().view(-1).view(torch.uint8)
        )
    ]


def first_difference(
    batches: Sequence[Batch],
    tensors: Values,
    orders: Iterable[int],
    over: Over = "devices",
    queues: int = QUEUES,
    expected: Sequence[Values] | None = None,
    cuda_graphs: bool = False,
) -> str | None:
    """Return a text about the first order that raises a PiperError or whose values differ from the CPU's; None if
    there is no such order.

    Args:
        batches, tensors, over, queues, cuda_graphs: See `run_steps`.
        orders: The orders to try.
        expected: The CPU's values (default: computed here).
    """
    if expected is None:
        expected = run_steps(batches, tensors, None)
    for order in orders:
        try:
            found = differences(expected, run_steps(batches, tensors, order, over, queues, cuda_graphs))
        except PiperError as error:
            return f"order {order}: {error}"
        if found:
            return f"order {order}: {', '.join(found[:3])} differ"
    return None
