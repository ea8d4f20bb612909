"""With all devices in one process, plans give bit for bit what the reference interpreter gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from lightning_piper.errors import ExecutionError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan import Plan, compile_plans
from lightning_piper.plan.instructions import Add, Instruction, Irecv, Run, SendInstruction
from lightning_piper.runtime import Executor, LocalTransport
from tests.models import CASES, Captured, captured
from tests.plan.programs import dag_of, edited, order, pipeline, place, plans_of, split
from tests.reference import differences
from tests.runtime.steps import CPU, reference, rig


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_model_as_a_pipeline(name: str, devices: int, microbatches: int) -> None:
    model, dag = captured(name), pipeline(name, devices, microbatches, ordered=False)
    assert differences(reference(model, dag), rig(model, dag).outcome()) == []


SHAPES: dict[str, Callable[[Captured], TrainingDAG]] = {
    "1F1B": lambda m: pipeline("gpt", 3, 4),
    "only one stage split": lambda m: dag_of(m.step, place(m.step, 3) + split(2, PP=1)),
    "the outer stages split": lambda m: dag_of(m.step, place(m.step, 3) + split(2, PP=[0, 2])),
    "received in another order than sent": lambda m: dag_of(
        m.step,
        place(m.step, 3) + split(3) + order(0, "F0 F1 F2") + order(1, "F2 F0 F1") + order(2, "F1 F2 F0"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_program(shape: str) -> None:
    model = captured("gpt")
    dag = SHAPES[shape](model)
    assert differences(reference(model, dag), rig(model, dag).outcome()) == []


def test_a_second_step_is_like_the_first() -> None:
    model, dag = captured("dropout"), pipeline("dropout", 2, 2)
    devices = rig(model, dag)
    first = devices.outcome(seed=3)
    assert differences(first, devices.outcome(seed=3)) == []
    other = differences(first, devices.outcome(seed=4))
    assert {"first.bias", "first.weight", "second.bias", "second.weight"} < set(other)


def test_random_chunks_leave_the_generator_as_it_was() -> None:
    devices = rig(captured("dropout"), pipeline("dropout", 2, 2))
    before = torch.get_rng_state()
    devices.step()
    assert torch.equal(torch.get_rng_state(), before)


# Negative controls: the comparison above notices a plan that computes something else.


def exchange(instructions: list[Instruction]) -> None:
    """Exchange two receives, so that microbatch 1 gets the message of microbatch 2."""
    first, second = [i for i, x in enumerate(instructions) if isinstance(x, Irecv)][1:3]
    instructions.insert(first, instructions.pop(second))


def drop_term(instructions: list[Instruction]) -> None:
    instructions.remove(next(i for i in instructions if isinstance(i, Add) and i.in_place))


def other_samples(instructions: list[Instruction]) -> None:
    i, run = next((i, x) for i, x in enumerate(instructions) if isinstance(x, Run))
    start = run.slice.start + 1
    instructions[i] = dataclasses.replace(
        run, slice=dataclasses.replace(run.slice, start=start, stop=start + len(run.slice))
    )


@pytest.mark.parametrize("edit", [exchange, drop_term, other_samples])
@pytest.mark.parametrize("device", [0, 1])
def test_a_wrong_plan_gives_other_numbers(edit: Callable[[list[Instruction]], None], device: int) -> None:
    model, dag = captured("mlp"), pipeline("mlp", 2, 4, ordered=False)
    plans = dict(compile_plans(dag))
    plans[device] = edited(plans[device], edit)
    assert differences(reference(model, dag), rig(model, dag, plans).outcome()) != []


# Failures


def test_devices_that_wait_for_each_other_are_named() -> None:
    def drop_send(instructions: list[Instruction]) -> None:
        i = next(i for i, x in enumerate(instructions) if isinstance(x, SendInstruction))
        del instructions[i]

    plans = plans_of("mlp", 2, 2)
    plans[0] = edited(plans[0], drop_send)
    devices = rig(captured("mlp"), pipeline("mlp", 2, 2), plans)
    with pytest.raises(
        ExecutionError, match=r"wait for each other: .*device 1 waits in wait %\d+ recv, made by directive"
    ):
        devices.step()


def test_a_step_after_one_that_failed_is_whole() -> None:
    model, dag = captured("conv"), pipeline("conv", 2, 2)
    devices = rig(model, dag)
    last = devices.executors[1]
    stop = len(last._code) // 2
    kept = last._code[stop]

    def fail() -> None:
        raise RuntimeError("no more memory")

    last._code[stop] = fail
    with pytest.raises(ExecutionError, match=r"device 1: \w+ %\d+ .* failed: no more memory") as caught:
        devices.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    last._code[stop] = kept
    assert all(torch.equal(x, model.tensors[name]) for name, x in devices.tensors.items())
    assert differences(reference(model, dag), devices.outcome()) == []


def test_one_of_several_devices_cannot_go_alone() -> None:
    model = captured("mlp")
    plans: dict[int, Plan] = plans_of("mlp", 2, 2)
    executor = Executor(plans[1], model.step, model.tensors, model.tensors, LocalTransport(plans), CPU)
    with pytest.raises(
        ExecutionError, match=r"device 1 waits in wait %\d+ recv.*\. Run all devices .* with run_local"
    ):
        executor.step(model.leaves, seed=0)
