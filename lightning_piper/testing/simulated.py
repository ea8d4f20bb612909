"""Plans on a simulated accelerator, in drawn orders, against the same plans on the CPU: equal bit by bit, or a finding.

batches = [Batch(dag, plans, leaves)] * 2
assert first_difference(batches, tensors, range(100)) is None
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from lightning_piper.accelerators.simulated import QUEUES, Simulated
from lightning_piper.errors import PiperError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime import Executor, GradientBuffer, LocalTransport, StepResult, local_shards_of, run_local, shards_of
from lightning_piper.runtime.simulated import SimulatedTransport, samples_of
from lightning_piper.runtime.transport import Transport

Over = Literal["devices", "one device"]
Values = Mapping[str, torch.Tensor]
CPU = torch.device("cpu")
RATE = 1 / 64  # of the changes between steps: what the last step left must not pass for what this one makes


@dataclass(frozen=True)
class Batch:
    """A step, and its plans.

    Attributes:
        dag: the finished DAG.
        plans: of its devices.
        leaves: the global batch.
        last: of the batches of an accumulation; the parameters change after it.
    """

    dag: TrainingDAG
    plans: Mapping[int, Plan]
    leaves: Sequence[torch.Tensor]
    last: bool = True


@dataclass
class _Device:
    """What one device holds, and what it has found."""

    tensors: dict[str, torch.Tensor]
    shards: dict[Bucket, torch.Tensor] = field(default_factory=dict)
    kept: GradientBuffer = field(default_factory=dict)
    found: list[StepResult] = field(default_factory=list)

    def executor(self, batch: Batch, plan: Plan, transport: Transport) -> Executor:
        return Executor(plan, batch.dag.step, self.tensors, self.tensors, transport, CPU, self.shards, self.kept)

    def after(self, batch: Batch, plan: Plan, result: StepResult) -> None:
        """Keep what a step gave, and change the parameters by it as an optimizer does, on the caller's stream."""
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
    batches: Sequence[Batch], tensors: Values, order: int | None, over: Over = "devices", queues: int = QUEUES
) -> list[Values]:
    """What each device has after steps with these batches: gradients and metrics of each, and parameters and buffers in the end.

    Args:
        batches: those with the same plans have the same executors; gradients that are accumulated go from one to the next.
        tensors: parameters and buffers; each device has its own.
        order: in which the simulated accelerator works; None: on the CPU.
        over: `devices`: each has streams and memory of its own, and communicates as with NCCL. `one device`: all plans run on one,
            and hand tensors over.
        queues: of a device.

    Raises:
        ExecutionError: queues wait for each other, or an operation met memory that was in use again.
    """
    devices = {d: _Device({n: x.clone() for n, x in tensors.items()}) for d in sorted(batches[0].plans)}
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
    for d, device in devices.items():
        device.shards = shards_of(batches[0].plans[d], device.tensors, CPU)
    executors: dict[int, list[Executor]] = {}
    for seed, batch in enumerate(batches):
        if id(batch.plans) not in executors:
            transport = LocalTransport(batch.plans)
            executors[id(batch.plans)] = [devices[d].executor(batch, batch.plans[d], transport) for d in devices]
        results = run_local(executors[id(batch.plans)], batch.leaves, seed, last=batch.last)
        for d, result in zip(devices, results, strict=True):
            devices[d].after(batch, batch.plans[d], result)


def _on_many(simulated: Simulated, batches: Sequence[Batch], devices: Mapping[int, _Device]) -> None:
    transport = SimulatedTransport(simulated, batches[0].plans)
    for batch in batches:
        transport.connect(batch.plans)

    def program(d: int) -> None:
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
    """Which values of which devices are not the same bits."""
    return [
        f"device {d}: {name}"
        for d, (a, b) in enumerate(zip(expected, found, strict=True))
        for name in a
        if not torch.equal(a[name].contiguous().view(-1).view(torch.uint8), b[name].contiguous().view(-1).view(torch.uint8))
    ]


def first_difference(
    batches: Sequence[Batch], tensors: Values, orders: Iterable[int], over: Over = "devices", queues: int = QUEUES,
    expected: Sequence[Values] | None = None,
) -> str | None:  # fmt: skip
    """What is wrong in the first order in which something is; None if the accelerator gives what the CPU gives in all of them.

    Args:
        expected: what the CPU gives; by default it is asked.
    """
    if expected is None:
        expected = run_steps(batches, tensors, None)
    for order in orders:
        try:
            found = differences(expected, run_steps(batches, tensors, order, over, queues))
        except PiperError as error:
            return f"order {order}: {error}"
        if found:
            return f"order {order}: {', '.join(found[:3])} differ"
    return None
