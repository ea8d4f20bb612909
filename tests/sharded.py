"""Programs that shard, and trainings with shards, which tests of several packages share."""

from __future__ import annotations

from typing import Any

import torch

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LOSS, Step
from lightning_piper.ir.values import view_as
from lightning_piper.passes import eliminate
from lightning_piper.passes.completion import complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.runtime import Executor, LocalTransport, local_shards_of, run_local, shards_of
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.models import Captured
from tests.plan.programs import Program, dag_of, one_f_one_b, split

CPU = torch.device("cpu")
STEPS = 3


def replicate(devices: Any, filter: Any = None, **fields: Any) -> dict[str, Any]:
    return {"op": "replicate", "filter": filter or {}, "devices": list(devices), **fields}


def stages(step: Step, groups: list[list[int]]) -> list[dict[str, Any]]:
    """Return `place` directives in JSON that place stage i on group i, modulo the number of groups. Work
    without a stage is on the first group.
    """
    found = sorted({region.tags.get("PP", -1) for region in step.at(step.size).regions})
    return [
        {"op": "place", "filter": {"PP": s if s >= 0 else "-"}, "devices": groups[max(s, 0) % len(groups)]}
        for s in found
    ]


LEVELS = ({"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True})
NAMES = ("optimizer", "grads", "params")


def program(step: Step, shape: str, level: dict[str, Any], **more: Any) -> Program:
    """Return a program with two replicas: of the whole step, with or without microbatches, or of a pipeline
    of two stages.

    Args:
        step: The captured step.
        shape: Name of the program's form, such as "DP2" or "split before".
        level: The fields of `replicate` that shard, such as `{"shard_params": True}`.
        more: More fields of `replicate`.
    """
    whole, both = {"op": "place", "filter": {}, "devices": [0, 1]}, replicate([0, 1], **level, **more)
    match shape:
        case "DP2":
            return [whole, both]
        case "split before":
            return [whole, *split(2), both]
        case "split after":
            return [whole, both, *split(2)]
        case "part split":
            return [whole, both, *split(2, PP=1)]
    groups = [[0, 2], [1, 3]]
    order = one_f_one_b(2, 2) if shape == "PP2xDP2" else []
    return [*stages(step, groups), *split(2), *order, replicate(groups, **level, **more)]


def finished(model: Captured, directives: Program) -> TrainingDAG:
    """Return the finished DAG, which is checked before and after the elimination of communication."""
    dag = dag_of(model.step, directives)
    check(dag, final=True)
    eliminate(dag)
    check(dag, final=True)
    return dag


def run(model: Captured, dag: TrainingDAG) -> Outcome:
    return interpret(dag, model.tensors, model.leaves)


def distance(a: Outcome, b: Outcome) -> float:
    """Return the largest difference of a gradient or the loss, relative to the tensor's largest element.
    Assert that all logged values agree within 1e-6."""
    assert a.grads.keys() == b.grads.keys() and a.metrics.keys() == b.metrics.keys()
    pairs = [(a.grads[n].double(), b.grads[n].double()) for n in a.grads] + [
        (a.metrics[LOSS], b.metrics[LOSS])
    ]
    for name, value in a.metrics.items():  # values that a model logs may be float32
        torch.testing.assert_close(value, b.metrics[name], rtol=1e-6, atol=1e-6)
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=1e-3)) for x, y in pairs)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def trained_alone(model: Captured, dag: TrainingDAG) -> dict[str, torch.Tensor]:
    """Return name -> value, after `STEPS` steps of the interpreter with an AdamW over whole tensors, of all
    parameters that a device reads."""
    tensors = {name: x.clone(memory_format=torch.preserve_format) for name, x in model.tensors.items()}
    trained: dict[str, torch.Tensor] = {}
    adam = None
    for number in range(STEPS):
        outcome = interpret(dag, {n: x.detach() for n, x in tensors.items()}, model.leaves, number)
        if adam is None:
            trained = {name: tensors[name].requires_grad_() for name in outcome.grads}
            adam = optimizer(trained.values())
        for name, grad in outcome.grads.items():
            trained[name].grad = grad
        adam.step()
    read = {name for device in dag.devices() for name in _read_on(dag, device)}
    return {name: x.detach() for name, x in tensors.items() if name in read}


def trained_in_shards(model: Captured, dag: TrainingDAG) -> dict[str, torch.Tensor]:
    """Return name -> value of the same parameters after the same steps of the plans. Each device has an
    optimizer for its local shards, and for the parameters that it holds whole. The DAG is completed in place.

    Values that a device must not need are NaN: whole copies of sharded parameters, and the other devices'
    shards in the memory that it keeps. Assert that devices with the same whole parameter agree.
    """
    complete(dag)
    plans = compile_plans(dag)
    check_plans(plans)
    transport = LocalTransport(plans)
    executors, owned, pieces = [], [], []
    for _, plan in sorted(plans.items()):
        shards = shards_of(plan, model.tensors, CPU)
        for bucket, flat in shards.items():
            for member, part in enumerate(flat.chunk(bucket.members)):
                if plan.shards[bucket] and member != plan.replica:
                    part.fill_(float("nan"))
        sharded = {name for bucket in plan.shards for name in bucket.names}
        own = {
            n: torch.full_like(x, float("nan")) if n in sharded else x.clone()
            for n, x in model.tensors.items()
        }
        pieces.append(local_shards_of(plan, shards))
        owned.append({**own, **pieces[-1]})
        executors.append(Executor(plan, model.step, own, {}, transport, CPU, shards))
    adams: list[torch.optim.Optimizer | None] = [None] * len(executors)
    for number in range(STEPS):
        for i, result in enumerate(run_local(executors, model.leaves, seed=number)):
            for name, grad in result.grads.items():
                owned[i][name].requires_grad_().grad = grad
            if adams[i] is None and result.grads:
                adams[i] = optimizer([owned[i][name] for name in result.grads])
            if adam := adams[i]:
                adam.step()
    whole: dict[str, torch.Tensor] = {}
    for executor, tensors, own in zip(executors, owned, pieces, strict=True):
        plan = executor.plan
        specs = {
            name: spec
            for bucket in plan.shards
            for name, spec in zip(bucket.names, bucket.tensors, strict=True)
        }
        ranges = {
            name: (start, stop)
            for bucket in plan.shards
            for name, start, stop, _ in bucket.local_shards(plan.replica)
        }
        for name in _read_on(dag, plan.device):
            if name not in specs:
                found = tensors[name].detach()
                assert name not in whole or torch.equal(whole[name], found), f"devices disagree about {name}"
                whole[name] = found
            elif name in own:
                full = whole.setdefault(
                    name,
                    view_as(
                        torch.full((specs[name].numel,), float("nan"), dtype=specs[name].dtype), specs[name]
                    ),
                )
                start, stop = ranges[name]
                full.permute(specs[name].dim_order).view(-1)[start:stop] = own[name].detach()
    return whole


def _read_on(dag: TrainingDAG, device: int) -> set[str]:
    return {
        name
        for chunk in dag.of_type(Chunk)
        if device in chunk.devices
        for name in dag.interface(chunk).params
    }
