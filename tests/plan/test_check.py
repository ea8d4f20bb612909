"""`check_plans` accepts the plans that the compiler makes, and refuses plans with any of the faults below."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.plan.checks.deadlock import run_symbolically
from lightning_piper.plan.instructions import (
    Add,
    AllReduceInstruction,
    Deliver,
    Instruction,
    Irecv,
    Read,
    Record,
    ReportInstruction,
    Run,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from tests.models import CASES, captured
from tests.plan.programs import dag_of, edited, place, plans_of, split

Edit = Callable[[list[Instruction]], None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_compiled_plans_pass(name: str, devices: int, microbatches: int) -> None:
    check_plans(plans_of(name, devices, microbatches, ordered=False))


def test_plans_of_a_partly_split_step_pass() -> None:
    step = captured("gpt").step
    check_plans(compile_plans(dag_of(step, place(step, 3) + split(2, PP=1))))


def where(instructions: list[Instruction], kind: type[Instruction], number: int = 0) -> int:
    return [i for i, x in enumerate(instructions) if isinstance(x, kind)][number]


def drop(kind: type[Instruction], number: int = 0) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        del instructions[where(instructions, kind, number)]

    return edit


def overtake(kind: type[Instruction], a: int, b: int) -> Edit:
    """An edit that moves the b-th instruction of a kind directly before the a-th."""

    def edit(instructions: list[Instruction]) -> None:
        moved = instructions.pop(where(instructions, kind, b))
        instructions.insert(where(instructions, kind, a), moved)

    return edit


def mark(kind: type[Instruction], last: bool, number: int = 0) -> Edit:
    """An edit that sets whether an instruction is the last reader of its slots: the slot is emptied one
    reader too early, or never.
    """

    def edit(instructions: list[Instruction]) -> None:
        i = where(instructions, kind, number)
        reads = tuple(Read(read.slot, last) for read in instructions[i].reads)
        instructions[i] = dataclasses.replace(instructions[i], reads=reads)

    return edit


def exchange_messages(instructions: list[Instruction]) -> None:
    """Let two receives take each other's messages."""
    a, b = where(instructions, Irecv, 1), where(instructions, Irecv, 2)
    first, second = instructions[a], instructions[b]
    assert isinstance(first, Irecv) and isinstance(second, Irecv)
    instructions[a] = dataclasses.replace(first, message=second.message)
    instructions[b] = dataclasses.replace(second, message=first.message)


def send_other_shape(instructions: list[Instruction]) -> None:
    i = where(instructions, SendInstruction)
    send = instructions[i]
    assert isinstance(send, SendInstruction)
    instructions[i] = dataclasses.replace(send, tensors=send.tensors * 2)


def reduce_twice(instructions: list[Instruction]) -> None:
    i = where(instructions, AllReduceInstruction)
    reduce = instructions[i]
    assert isinstance(reduce, AllReduceInstruction)
    again = dataclasses.replace(reduce, node=999, reads=(), writes=(999,))
    wait = WaitWork(node=999, label="allreduce", writes=(999,), stream="metrics")
    report = where(instructions, ReportInstruction)
    instructions[report] = dataclasses.replace(
        instructions[report], reads=(*instructions[report].reads, Read(999, True))
    )
    instructions.insert(report, wait)
    instructions.insert(i + 1, again)
    instructions.insert(report + 2, WaitEvent(node=999, label="", event=998, shared=(999,)))
    instructions.insert(report + 2, Record(node=999, label="", stream="metrics", event=998))


# Name of the fault -> the device, the edit of its plan, what the error says.
FAULTS: dict[str, tuple[int, Edit, str]] = {
    "swapped posts": (
        1,
        overtake(Irecv, 1, 2),
        r"channel 0>1, message 1: post %\d+ recv.* expects the value of %\d+, but send",
    ),
    "receives fed each other's message": (1, exchange_messages, "channel 0>1, message 1: .* expects"),
    "dropped send": (0, drop(SendInstruction, 1), "at the end, slots are not empty"),
    "retired before it is sent": (
        0,
        lambda x: x.insert(0, x.pop(where(x, WaitSend))),
        "it waits for a send that was not started, or that is already done",
    ),
    "dropped post": (1, drop(Irecv, 1), r"slot s\d+ is not written"),
    "dropped wait": (1, drop(WaitWork, 1), r"slot s\d+ is read before it is written"),
    "dropped retire": (0, drop(WaitSend, 2), "no instruction waits for 1 send of the plan"),
    "dropped reduce": (0, drop(AllReduceInstruction), r"slot s\d+ is not written"),
    "dropped report": (0, drop(ReportInstruction), "at the end, slots are not empty"),
    "dropped forward": (0, drop(Run, 0), r"slot s\d+ is read before it is written"),
    "dropped backward": (1, drop(Run, 3), r"slot s\d+ is read before it is written"),
    "dropped last backward": (0, drop(Run, 5), r"slot s\d+ is read before it is written"),
    "dropped first sum": (0, drop(Add, 0), r"slot s\d+ is not written"),
    "dropped later sum": (0, drop(Add, 1), "at the end, slots are not empty"),
    "dropped delivery": (0, drop(Deliver), "at the end, slots are not empty"),
    "early drop": (
        0,
        lambda x: x.insert(where(x, Run, 2), dataclasses.replace(x[where(x, SendInstruction)], node=998)),
        "is read after",
    ),
    "late drop": (1, mark(Run, False, 1), "at the end, slots are not empty"),
    "delivered twice": (
        1,
        lambda x: x.append(x[where(x, Deliver)]),
        r"is read after deliver %\d+ update.* emptied it",
    ),
    "chunk run twice": (0, lambda x: x.insert(0, x[where(x, Run)]), r"slot s\d+ is (ready|empty)"),
    "other shape": (0, send_other_shape, "sends .*, but .* expects "),
    "reduced twice": (
        0,
        reduce_twice,
        r"group \(0, 1\), stream metrics: device 1 runs the collectives %\d+, but device 0 runs %\d+, %999\. ",
    ),
    "dropped event": (0, drop(Record, 0), r"event e0 is awaited before it is recorded"),
    "dropped wait for an event": (
        0,
        drop(WaitEvent, 0),
        r"was written on stream compute, and no event orders the two",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    device, edit, message = FAULTS[fault]
    plans = plans_of("mlp", 2, 3)
    check_plans(plans)
    plans[device] = edited(plans[device], edit)
    with pytest.raises(VerificationError, match=message):
        check_plans(plans)


def wait_first(instructions: list[Instruction]) -> None:
    """Let stage 0 wait for a gradient before it has sent the activation."""
    irecv = instructions.pop(where(instructions, Irecv))
    wait = instructions.pop(where(instructions, WaitWork))
    instructions[:0] = [irecv, wait]


def test_a_deadlock_is_found() -> None:
    plans = plans_of("mlp", 2, 3)
    run_symbolically(plans)
    plans[0] = edited(plans[0], wait_first)
    with pytest.raises(
        VerificationError, match=r"deadlock: device 0 waits in wait %\d+ recv.*; device 1 waits in wait %\d+"
    ):
        run_symbolically(plans)


def test_a_member_that_does_not_reduce_is_waited_for_in_vain() -> None:
    plans = plans_of("mlp", 2, 3)
    plans[1] = edited(plans[1], drop(AllReduceInstruction))
    with pytest.raises(VerificationError, match=r"deadlock: device 0 waits in wait %\d+ allreduce"):
        run_symbolically(plans)


def test_a_plan_that_is_missing_is_found() -> None:
    plans = plans_of("mlp", 2, 3)
    del plans[1]
    with pytest.raises(VerificationError, match="and a device with a plan at the other side"):
        check_plans(plans)
