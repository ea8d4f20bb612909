"""The simulated accelerator runs work late and in any order, gives the CPU's results, and shows missing
waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch

from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.errors import ExecutionError, VerificationError
from lightning_piper.plan import compile_plans
from lightning_piper.plan.checks.queues import check_queues
from lightning_piper.plan.instructions import Instruction, WaitEvent, WaitWork
from lightning_piper.testing.simulated import Batch, Over, first_difference
from tests.models import captured
from tests.plan.programs import edited, pipeline

CPU = torch.device("cpu")
ORDERS = range(12)  # in each order another stream of these programs runs last


def on(device: Simulated, name: str) -> None:
    device.set_stream(device.stream(CPU, name))


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_sees_what_another_one_made_if_it_waits(waits: bool) -> None:
    seen = []
    for order in ORDERS:
        with contextlib.suppress(*([] if waits else [ExecutionError])), Simulated(order) as device:
            on(device, "one")
            x = torch.ones(4) * 2
            event = device.current_stream().record_event()
            on(device, "other")
            if waits:
                device.current_stream().wait_event(event)
            device.record_stream(x, device.current_stream())
            seen.append((x + 1).sum().item())
    assert seen == [12.0] * len(ORDERS) if waits else 12.0 in seen and any(value != value for value in seen)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_goes_back_at_once_to_the_stream_that_made_it(recorded: bool) -> None:
    faults = 0
    for order in ORDERS:
        try:
            with Simulated(order) as device:
                on(device, "one")
                x = torch.full((1000,), 3.0)
                event = device.current_stream().record_event()
                on(device, "other")
                device.current_stream().wait_event(event)
                if recorded:
                    device.record_stream(x, device.current_stream())
                y = x + 1
                on(device, "one")
                del x
                torch.zeros(1000)
                device.synchronize()
                assert torch.equal(y.cpu(), torch.full((1000,), 4.0))
        except ExecutionError as error:
            assert "aten.add.Tensor on stream 1 uses memory that aten.full.default made on stream 0" in str(
                error
            )
            faults += 1
    assert faults == 0 if recorded else faults > 0


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(3), torch.nn.functional.dropout(torch.ones(8)), torch.rand(1)]
    torch.manual_seed(1)
    with Simulated(0) as device:
        found = [torch.rand(3), torch.nn.functional.dropout(torch.ones(8)), torch.rand(1)]
        device.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def batches_of(name: str, edit: Callable[[list[Instruction]], None] | None = None) -> list[Batch]:
    dag = pipeline(name, 2, 3)
    plans = dict(compile_plans(dag))
    if edit is not None:
        plans[1] = edited(plans[1], edit)
    leaves = captured(name).leaves
    return [Batch(dag, plans, leaves), Batch(dag, plans, [x.flip(0) for x in leaves])]


@pytest.mark.parametrize("over", ["devices", "one device"])
def test_a_pipeline_gives_the_bits_of_the_cpu(over: Over) -> None:
    assert first_difference(batches_of("dropout"), captured("dropout").tensors, ORDERS, over) is None


def first(
    kind: type[Instruction], change: Callable[[list[Instruction], int], None]
) -> Callable[[list[Instruction]], None]:
    return lambda plan: change(plan, next(i for i, x in enumerate(plan) if isinstance(x, kind)))


FAULTS = {
    "an event that is not awaited": first(WaitEvent, lambda plan, i: plan.pop(i)),
    "memory that is not recorded": first(
        WaitEvent, lambda plan, i: plan.__setitem__(i, dataclasses.replace(plan[i], shared=()))),
    "a message that another stream waits for": first(
        WaitWork, lambda plan, i: plan.__setitem__(i, dataclasses.replace(plan[i], stream="elsewhere"))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_other_numbers(fault: str) -> None:
    good = batches_of("mlp")
    plans = batches_of("mlp", FAULTS[fault])[0].plans
    wrong = [dataclasses.replace(batch, plans=plans) for batch in good]
    assert first_difference(good, captured("mlp").tensors, ORDERS) is None
    assert first_difference(wrong, captured("mlp").tensors, ORDERS) is not None


@pytest.mark.parametrize(("queues", "goes_on"), [(1, False), (2, True)])
def test_communicators_that_share_a_queue_stop_each_other_where_the_check_says_so(
    queues: int, goes_on: bool
) -> None:
    batches = batches_of("mlp")
    found = first_difference(batches, captured("mlp").tensors, ORDERS, queues=queues)
    if goes_on:
        check_queues(batches[0].plans, queues)
        assert found is None
    else:
        with pytest.raises(
            VerificationError,
            match=r"share a hardware queue\. In one queue, these collectives wait for each other: \w+ %\d+",
        ):
            check_queues(batches[0].plans, queues)
        assert found is not None and "the simulated accelerator cannot continue: " in found
