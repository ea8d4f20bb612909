"""Training in real processes, and the same training by the reference interpreter."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_piper import schedules
from lightning_piper.capture import capture
from lightning_piper.directives import to_json
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Step
from lightning_piper.ops.metrics import metric_names
from lightning_piper.passes import eliminate
from lightning_piper.plan import Plan, compile_plans
from lightning_piper.plan.instructions import Add, AllReduceInstruction, Irecv
from lightning_piper.runtime import Executor, ProcessTransport, local_shards_of, shards_of
from lightning_piper.verify.interpreter import interpret
from tests.distributed.processes import LIMIT
from tests.models import Captured, Case, captured
from tests.plan.programs import Program, dag_of, edited, one_f_one_b, order, pipeline, place, split
from tests.simulate.programs import WIDTH, Chain

CPU = torch.device("cpu")
REPLICATED = ("DP2", "PP2xDP2", "PP2xDP2 unordered")


@dataclass(frozen=True)
class Job:
    """One model under one program, for some steps. `fault`: what is wrong with the plan of device 1.
    `sharded`: what replicas share: `optimizer`, `grads` or `params`. A shape may be the name of a schedule;
    the model is then a chain of stages, such as `chain8`, and with more devices than ranks each rank is a
    group of two.
    """

    name: str
    devices: int = 2
    microbatches: int = 3
    shape: str = "pipeline"
    fault: str = ""
    steps: int = 5
    sharded: str = ""

    def dag(self) -> TrainingDAG:
        step = model(self.name).step
        if self.shape in REPLICATED or self.name.startswith("chain"):
            dag = dag_of(step, self._scheduled() if self.name.startswith("chain") else self._replicated(step))
            eliminate(dag)
            return dag
        if self.shape == "pipeline":
            return pipeline(self.name, self.devices, self.microbatches, ordered=False)
        if self.shape == "1F1B":
            return pipeline(self.name, self.devices, self.microbatches)
        if self.shape == "one stage split":
            return dag_of(step, place(step, self.devices) + split(2, PP=1))
        assert self.shape == "crossing"
        return dag_of(step, place(step, 2) + split(3) + order(0, "F0 F1 F2") + order(1, "F2 F0 F1"))

    def _scheduled(self) -> Program:
        """Return a schedule of `lightning_piper.schedules`. It is replicated if it has half as many ranks as
        there are devices.
        """
        builder, stages = getattr(schedules, self.shape), int(self.name.removeprefix("chain"))
        program = to_json(builder(stages, self.microbatches))
        ranks = 1 + max(entry["devices"][0] for entry in program if entry["op"] == "place")
        if ranks == self.devices:
            return program
        groups = [[rank, rank + ranks] for rank in range(ranks)]
        return [*to_json(builder(stages, self.microbatches, devices=groups)), self._replicate(groups)]

    def _replicate(self, groups: list[list[int]]) -> dict[str, Any]:
        sharded = {f"shard_{self.sharded}": True} if self.sharded else {}
        return {"op": "replicate", "filter": {}, "devices": groups, "bucket_size": 0.0001, **sharded}

    def _replicated(self, step: Step) -> Program:
        """Return two replicas of the whole step, or of a pipeline whose stage i is on devices i and i + 2."""
        stages = 1 if self.shape == "DP2" else 2
        program: Program = []
        for place_ in place(step, stages):
            (first,) = place_["devices"]
            program.append({**place_, "devices": [first, first + stages]})
        groups = [[first, first + stages] for first in range(stages)]
        program += split(self.microbatches)
        program += one_f_one_b(2, self.microbatches) if self.shape == "PP2xDP2" else []
        return [*program, self._replicate(groups)]


def exchange(instructions: list[Any]) -> None:
    """Let two receives get each other's message."""
    first, second = [i for i, x in enumerate(instructions) if isinstance(x, Irecv)][1:3]
    instructions.insert(first, instructions.pop(second))


def drop_term(instructions: list[Any]) -> None:
    instructions.remove(next(x for x in instructions if isinstance(x, Add) and x.in_place))


def own_sum(instructions: list[Any]) -> None:
    """Let a replica add one of its terms to the sum over replicas twice."""
    where = next(
        i for i, x in enumerate(instructions) if isinstance(x, AllReduceInstruction) and x.bucket is not None
    )
    found = instructions[where]
    instructions[where] = dataclasses.replace(found, reads=found.reads * 2)


FAULTS = {"exchange": exchange, "drop term": drop_term, "own sum": own_sum}


@functools.cache
def model(name: str) -> Captured:
    """Return a model of `tests.models`, or a chain with as many stages as its name says, with a batch of 16
    samples.
    """
    if not name.startswith("chain"):
        return captured(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, batch = Chain(int(name.removeprefix("chain"))), torch.randn(16, WIDTH)
    tensors = {n: x.detach() for n, x in module.named_parameters()}
    return Captured(Case(lambda: module), module, batch, capture(module, batch), tensors, [batch])


@functools.cache
def plans_of(job: Job) -> dict[int, Plan]:
    plans = dict(compile_plans(job.dag()))
    if job.fault:
        plans[1] = edited(plans[1], FAULTS[job.fault])
    return plans


def compile_all(jobs: list[Job]) -> None:
    """Capture and compile what is the same on every rank."""
    for job in jobs:
        plans_of(job)


@dataclass(frozen=True)
class Trained:
    """The metrics of every step, and the parameters and buffers at the end."""

    metrics: list[Tensor]
    tensors: dict[str, Tensor]


def train(rank: int, jobs: list[Job]) -> list[Trained]:
    """Train one process's part of all jobs, one after another over one transport."""
    results = []
    transport: ProcessTransport | None = None
    for job in jobs:
        plans = plans_of(job)
        if transport is None:
            transport = ProcessTransport(plans, range(dist.get_world_size()), CPU, timeout=LIMIT)
        else:
            transport.connect(plans)
        if rank not in plans:
            results.append(Trained([], {}))
            continue
        one = model(job.name)
        tensors = {name: x.clone() for name, x in one.tensors.items()}
        shards = shards_of(plans[rank], tensors, CPU)
        executor = Executor(plans[rank], one.step, tensors, tensors, transport, CPU, shards)
        pieces = local_shards_of(plans[rank], shards)
        metrics, optimizer, own = [], None, {}
        local_batch = slice(
            plans[rank].replica * plans[rank].local_batch_size,
            (plans[rank].replica + 1) * plans[rank].local_batch_size,
        )
        leaves = [x[local_batch] if x.ndim else x for x in one.leaves]
        for number in range(job.steps):
            result = executor.step(leaves, seed=number)
            if optimizer is None and result.grads:
                own = {name: pieces.get(name, tensors[name]).requires_grad_() for name in result.grads}
                optimizer = torch.optim.AdamW(own.values(), lr=0.01)
            for name, grad in result.grads.items():
                own[name].grad = grad
            if optimizer is not None:
                optimizer.step()
            metrics.append(result.metrics)
        for bucket, flat in shards.items():  # other parts of a parameter are unchanged, and not compared
            for name, start, stop, at in bucket.local_shards(plans[rank].replica):
                if name not in own:
                    continue  # frozen
                at += plans[rank].replica * bucket.shard if len(flat) > bucket.shard else 0
                spec = bucket.tensors[bucket.names.index(name)]
                own[name] = torch.full(spec.shape, float("nan"))
                own[name].permute(spec.dim_order).view(-1)[start:stop] = flat[at : at + stop - start].detach()
                tensors[name] = own[name]
        # A device has a buffer if it has the region that changes the buffer. All other buffers are unchanged.
        changed = {
            n: x.detach() for n, x in tensors.items() if n in own or not torch.equal(x, one.tensors[n])
        }
        results.append(Trained(metrics, changed))
    assert transport is not None
    transport.close()
    return results


def train_by_reference(job: Job) -> Trained:
    one, dag = model(job.name), job.dag()
    tensors = {name: x.clone() for name, x in one.tensors.items()}
    metrics, optimizer, own = [], None, {}
    for number in range(job.steps):
        outcome = interpret(dag, {name: x.detach() for name, x in tensors.items()}, one.leaves, number)
        if optimizer is None:
            own = {name: tensors[name].requires_grad_() for name in outcome.grads}
            optimizer = torch.optim.AdamW(own.values(), lr=0.01)
        for name, grad in outcome.grads.items():
            own[name].grad = grad
        optimizer.step()
        for name, value in outcome.buffers.items():
            tensors[name].copy_(value)
        metrics.append(torch.stack([outcome.metrics[name] for name in metric_names(dag.code)]))
    return Trained(
        metrics, {n: x.detach() for n, x in tensors.items() if n in own or not torch.equal(x, one.tensors[n])}
    )
