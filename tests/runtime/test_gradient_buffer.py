"""Gradients of several batches: they are kept until the last batch, and then summed over the replicas once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_piper.errors import ExecutionError
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.ops.communication.reduce import AllReduce, AllReduceInstruction, ReduceScatter
from lightning_piper.ops.update import Update
from lightning_piper.plan import Plan, compile_plans
from lightning_piper.plan.instructions import Deliver, Run
from lightning_piper.plan.instructions import ReduceScatterInstruction as ReduceScatterInstruction
from lightning_piper.plan.no_sync import sync_only
from lightning_piper.runtime import Executor, LocalTransport, joined, run_local, shards_of
from tests.distributed.training import Job, plans_of
from tests.models import captured
from tests.plan.programs import dag_of
from tests.runtime.steps import CPU

SHAPES = [("DP2", 2), ("PP2xDP2", 4), ("PP2xDP2 unordered", 4)]


def job(shape: str, devices: int, sharded: str = "") -> Job:
    """A job with the model `exact`, whose sums in float64 are exact, so that their order does not matter."""
    return Job("exact", microbatches=2, shape=shape, devices=devices, sharded=sharded)


def executors_of(plans: dict[int, Plan]) -> list[Executor]:
    model, transport = captured("exact"), LocalTransport(plans)
    return [
        Executor(
            plan,
            model.step,
            model.tensors,
            model.tensors,
            transport,
            CPU,
            shards_of(plan, model.tensors, CPU),
        )
        for _, plan in sorted(plans.items())
    ]


def counted(executors: list[Executor], last: bool) -> int:
    """How many sums of gradients over replicas the executors run, with the last batch or with an earlier one."""
    kinds = AllReduceInstruction | ReduceScatterInstruction
    found = set()
    for executor in executors:
        code, source = executor._variants[last]
        for bound, i in zip(code, source, strict=True):
            instruction = executor.plan.instructions[i]
            if (
                isinstance(instruction, kinds)
                and instruction.bucket is not None
                and "keep" not in bound.__name__
            ):  # type: ignore[attr-defined]
                found.add((executor.plan.device, i))
    return len(found)


@pytest.mark.parametrize("sharded", ["", "optimizer", "grads", "params"])
@pytest.mark.parametrize("shape, devices", SHAPES)
def test_the_last_batch_brings_the_sum_of_all(shape: str, devices: int, sharded: str) -> None:
    plans = plans_of(job(shape, devices, sharded))
    ordered = [plans[device] for device in sorted(plans)]
    executors = executors_of(plans)
    batches = [[torch.randint(-3, 4, (4, 4)).double()] for _ in range(3)]
    single = [joined(ordered, run_local(executors, leaves, seed=0)) for leaves in batches]
    parts = [
        joined(ordered, run_local(executors, leaves, 0, last=i == 2)) for i, leaves in enumerate(batches)
    ]
    waits = sharded in ("", "optimizer")
    assert (parts[0] == {}) == waits
    for name in single[0]:
        total = sum(grads[name] for grads in single)
        found = parts[2][name] if waits else sum(grads[name] for grads in parts)
        assert torch.equal(torch.as_tensor(total), torch.as_tensor(found))
        assert not torch.equal(single[2][name], torch.as_tensor(total))
    # Nothing is left over for the next accumulation.
    again = joined(ordered, run_local(executors, batches[1], seed=0))
    assert all(torch.equal(again[name], x) for name, x in single[1].items())
    assert (counted(executors, False) == 0) == waits and counted(executors, True) > 0


def test_logged_values_come_with_every_batch() -> None:
    plans = plans_of(job("DP2", 2))
    executors = executors_of(plans)
    leaves = captured("exact").leaves
    kept = run_local(executors, leaves, seed=0, last=False)[0].metrics
    assert torch.equal(kept, run_local(executors, leaves, seed=0)[0].metrics)


@pytest.mark.parametrize("shape, devices", SHAPES)
def test_what_waits(shape: str, devices: int) -> None:
    """The sums, their transfers to other stages, and the updates; with sharded gradients nothing."""
    for sharded, kinds in (
        ("", {AllReduce, Update}),
        ("optimizer", {ReduceScatter, Update}),
        ("grads", set()),
        ("params", set()),
    ):
        dag = job(shape, devices, sharded).dag()
        found = {type(dag.nodes[i]) for i in sync_only(dag)}
        assert kinds <= found
        assert bool(found) == bool(kinds)
        assert (Send in found) == (devices == 4 and bool(kinds))  # of the tied parameter
        metrics = {n.id for n in dag.of_type(AllReduce) if n.outputs[0].kind != "grad"}
        assert not metrics & sync_only(dag)


def test_one_parameter_waits_as_a_whole() -> None:
    """A parameter of two stages, one of which sums its gradients at every microbatch: none of the two
    waits.
    """
    program = job("PP2xDP2 unordered", 4)
    step = captured("exact").step
    replicate = program._replicated(step)[-1]
    both = [
        {**replicate, "filter": {"PP": 0}, "devices": replicate["devices"][0], "shard_optimizer": True},
        {**replicate, "filter": {"PP": 1}, "devices": replicate["devices"][1], "shard_grads": True},
    ]
    dag = dag_of(step, [*program._replicated(step)[:-1], *both])
    assert sync_only(dag) == frozenset()
    alike = [{**entry, "shard_grads": False, "shard_optimizer": True} for entry in both]
    dag = dag_of(step, [*program._replicated(step)[:-1], *alike])
    updates = [
        node.id for node in dag.of_type(Update) if node.inputs and dag.value(node.inputs[0]).kind == "grad"
    ]
    assert set(updates) <= sync_only(dag)


def test_a_batch_of_another_size_that_cannot_finish_the_sum_is_refused() -> None:
    plans = plans_of(job("DP2", 2))
    executors = executors_of(plans)
    leaves = captured("exact").leaves
    run_local(executors, leaves, seed=0, last=False)
    other = dataclasses.replace(plans[0], sync_only=frozenset())
    model = captured("exact")
    transport, buffer = LocalTransport({0: other}), executors[0]._gradient_buffer
    alone = Executor(other, model.step, model.tensors, model.tensors, transport, CPU, gradient_buffer=buffer)
    with pytest.raises(
        ExecutionError,
        match=r"device 0 has accumulated gradients of a.*, but the plan of this batch cannot add to them",
    ):
        alone.begin([x[:2] for x in leaves], seed=0)


def test_a_failed_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(job("DP2", 2))
    executors = executors_of(plans)
    leaves = captured("exact").leaves
    expected = run_local(executors, leaves, seed=0)[0].grads
    run_local(executors, leaves, seed=0, last=False)
    code = executors[0]._variants[False][0]
    where = next(
        i for i, k in enumerate(executors[0]._variants[False][1]) if isinstance(plans[0].instructions[k], Run)
    )
    good = code[where]

    def fail() -> None:
        raise ValueError("seeded")

    code[where] = fail
    with pytest.raises(ExecutionError, match="seeded"):
        run_local(executors, leaves, seed=0, last=False)
    code[where] = good
    for executor in executors:
        executor._running = True  # both were in the step that failed
    found = run_local(executors, leaves, seed=0)[0].grads
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_only_deliveries_of_what_waits_are_left_out() -> None:
    plans = compile_plans(job("DP2", 2).dag())
    for plan in plans.values():
        late = [i for i in plan.instructions if i.node in plan.sync_only]
        assert {type(i) for i in late} >= {AllReduceInstruction, Deliver}
        assert not any(isinstance(i, Run) for i in late)
