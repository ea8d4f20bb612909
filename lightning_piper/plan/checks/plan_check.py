"""Checks on finished plans that do not depend on how the plans were made.

The checks take time linear in the number of instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.values import TensorSpec
from lightning_piper.plan.checks.clocks import problems_of
from lightning_piper.plan.checks.deadlock import run_symbolically
from lightning_piper.plan.checks.queues import check_queues
from lightning_piper.plan.instructions import (
    Add,
    Channel,
    Collective,
    EarlyUpdateInstruction,
    Group,
    Instruction,
    Irecv,
    ReportInstruction,
    SendInstruction,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.no_sync_plan import no_sync_instructions
from lightning_piper.plan.plan import Plan

ADVICE = ". If you added an operation, check its lowering. Otherwise, report this"
# States of a slot: its message or collective has started; its value is there.
_PENDING, _READY = "pending", "ready"


Image = Callable[[int], int]  # device -> the device whose plan represents it (`Plans.image`)


def check_plans(plans: Mapping[int, Plan], image: Image = lambda device: device) -> None:
    """Check the plans of all devices of a step, or of representative devices.

    The checks:

    - Every slot is written before it is read, not read after its last read, and empty at the end.
    - However streams run, values are read after they are made, and changed or freed after they are read
      (`clocks`).
    - The messages of every channel are sent and received in one order, with the same shapes.
    - The members of every group communicate in one order.
    - Every send is waited for, and every device reports once.
    - No device waits forever, and no stream of the hardware does.

    If batches before the last one of a gradient accumulation run fewer instructions, the plans with only these
    instructions are checked in the same way.

    Args:
        image: Device -> the device whose plan represents it (`Plans.image`).

    Raises:
        VerificationError: A check fails. The message names the device, the instruction and the problem.
    """
    _check(plans, image)
    if any(plan.sync_only for plan in plans.values()):
        try:
            _check(
                {
                    device: replace(plan, instructions=tuple(x for _, x in no_sync_instructions(plan)))
                    for device, plan in plans.items()
                },
                image,
            )
        except VerificationError as error:
            raise VerificationError(
                f"for a batch that is not the last batch of an accumulation: {error}"
            ) from None


def _check(plans: Mapping[int, Plan], image: Image) -> None:
    """Run all checks on plans."""
    for plan in plans.values():
        _check_slots(plan)
        _check_streams(plan)
        _check_sends(plan)
    _check_channels(plans)
    _check_groups(plans, image)
    run_symbolically(plans, image)
    check_queues(plans)


def _refuse(device: int, index: int, instruction: Instruction, problem: str) -> None:
    raise VerificationError(
        f"plan of device {device}, instruction {index} ({instruction.where}): {problem}{ADVICE} [PIPER-V003]"
    )


def _check_slots(plan: Plan) -> None:
    """Check that each slot of a plan is written before it is read, and only once apart from sums in place,
    and that all slots are empty at the end. A wait must be for the work that fills the slot."""
    state: dict[int, str] = {}  # slot that is not empty -> `_PENDING` or `_READY`
    owner: dict[int, int] = {}  # pending slot -> node that completes it
    sums: dict[int, int] = {}  # slot -> node that adds it up
    dropped: dict[int, Instruction] = {}  # slot -> instruction with the last read of the slot
    begun: dict[int, Instruction] = {}  # slot of a gradient -> its early update
    for i, instruction in enumerate(plan.instructions):
        for read in instruction.reads:
            if state.get(read.slot) != _READY:
                how = (
                    "before it is written"
                    if read.slot not in dropped
                    else f"after {dropped[read.slot].where} emptied it"
                )
                _refuse(plan.device, i, instruction, f"slot s{read.slot} is read {how}")
            if read.last:
                del state[read.slot]
                dropped[read.slot] = instruction
            if isinstance(instruction, EarlyUpdateInstruction):
                begun[read.slot] = instruction
        for slot in instruction.writes:
            if slot is None:
                continue
            expected = None
            if isinstance(instruction, WaitWork):
                expected = _PENDING
            elif isinstance(instruction, Add) and instruction.in_place:
                expected = _READY
            if state.get(slot) != expected or slot in dropped:
                found = "emptied" if slot in dropped else state.get(slot, "not written")
                needs = f"{expected} slot" if expected else "slot that is not written yet"
                _refuse(plan.device, i, instruction, f"slot s{slot} is {found}, but it needs a {needs}")
            if slot in begun:
                where = begun[slot].where
                _refuse(
                    plan.device,
                    i,
                    instruction,
                    f"it adds to the gradient in slot s{slot} after {where} has read it",
                )
            if isinstance(instruction, Add) and not instruction.in_place:
                sums[slot] = instruction.node
            elif isinstance(instruction, Add) and sums.get(slot) != instruction.node:
                _refuse(
                    plan.device, i, instruction, f"it adds in place to slot s{slot}, which holds another sum"
                )
            if isinstance(instruction, WaitWork) and owner[slot] != instruction.node:
                _refuse(
                    plan.device,
                    i,
                    instruction,
                    f"it waits for the result in slot s{slot}, but %{owner[slot]} started that work",
                )
            if isinstance(instruction, Irecv | Collective):
                state[slot], owner[slot] = _PENDING, instruction.node
            else:
                state[slot] = _READY
    if state:
        shown = ", ".join(f"s{slot}" for slot in sorted(state)[:5])
        raise VerificationError(
            f"plan of device {plan.device}: at the end, slots are not empty: {shown}{ADVICE} [PIPER-V003]"
        )


def _check_streams(plan: Plan) -> None:
    for i, instruction, problem in problems_of(plan):
        _refuse(plan.device, i, instruction, problem)


def _check_sends(plan: Plan) -> None:
    """Check that a plan waits for each of its sends once, and that it reports once."""
    sent: dict[int, Instruction] = {}
    reports = 0
    for i, instruction in enumerate(plan.instructions):
        if isinstance(instruction, SendInstruction):
            sent[instruction.node] = instruction
        elif isinstance(instruction, WaitSend) and sent.pop(instruction.node, None) is None:
            _refuse(
                plan.device,
                i,
                instruction,
                "it waits for a send that was not started, or that is already done",
            )
        reports += isinstance(instruction, ReportInstruction)
    if sent:
        shown = next(iter(sent.values())).where
        raise VerificationError(
            f"plan of device {plan.device}: no instruction waits for {counted(len(sent), 'send')} of the plan. The first "
            f"one is {shown}"
            f"{ADVICE} [PIPER-V003]"
        )
    if reports != 1:
        raise VerificationError(
            f"plan of device {plan.device}: it reports the step's results {reports} times instead of once{ADVICE} [PIPER-V003]"
        )


def _check_channels(plans: Mapping[int, Plan]) -> None:
    """Check that the sends of each channel match its receives, in order: the same value, as tensors of the
    same specs."""
    sends: dict[Channel, list[SendInstruction]] = {}
    irecvs: dict[Channel, list[Irecv]] = {}
    for plan in plans.values():
        for i, instruction in enumerate(plan.instructions):
            if isinstance(instruction, SendInstruction | Irecv):
                end = 0 if isinstance(instruction, SendInstruction) else 1
                if instruction.channel[end] != plan.device or instruction.channel[1 - end] not in plans:
                    _refuse(
                        plan.device,
                        i,
                        instruction,
                        f"it uses the channel from device {instruction.channel[0]} to device "
                        f"{instruction.channel[1]}. This channel needs device {plan.device} at its "
                        f"{'end' if end else 'start'}, and a device with a plan at the other side",
                    )
                if isinstance(instruction, SendInstruction):
                    sends.setdefault(instruction.channel, []).append(instruction)
                else:
                    irecvs.setdefault(instruction.channel, []).append(instruction)
    for channel in sorted(set(sends) | set(irecvs)):
        for i, (send, irecv) in enumerate(zip_longest(sends.get(channel, ()), irecvs.get(channel, ()))):
            where = f"channel {_name(channel)}, message {i}"
            if send is None or irecv is None:
                one, other = (irecv.where, "send") if send is None else (send.where, "receive")
                raise VerificationError(f"{where}: {one} has no matching {other}{ADVICE} [PIPER-V003]")
            if send.node != irecv.message:
                raise VerificationError(
                    f"{where}: {irecv.where} expects the value of %{irecv.message}, but {send.where} comes "
                    f"first{ADVICE} [PIPER-V003]"
                )
            if send.tensors != irecv.tensors:
                raise VerificationError(
                    f"{where}: {send.where} sends {_shapes(send.tensors)}, but {irecv.where} expects "
                    f"{_shapes(irecv.tensors)}{ADVICE} [PIPER-V003]"
                )


def _check_groups(plans: Mapping[int, Plan], image: Image) -> None:
    """Check that all devices of a group run the same collectives in the same order. `image` returns the
    device whose plan represents the plan of a device."""
    orders: dict[Group, dict[int, list[int]]] = {}
    for plan in plans.values():
        for i, instruction in enumerate(plan.instructions):
            if isinstance(instruction, Collective):
                if plan.device not in instruction.members:
                    _refuse(
                        plan.device,
                        i,
                        instruction,
                        f"device {plan.device} is not a member of the group {instruction.members}",
                    )
                orders.setdefault(instruction.group, {}).setdefault(plan.device, []).append(instruction.node)
    for group, by_device in sorted(orders.items()):
        members, stream = group
        own = list(dict.fromkeys(map(image, members)))
        first = by_device.get(own[0], [])
        for device in own:
            found = by_device.get(device, [])
            if found != first:
                raise VerificationError(
                    f"group {members}, stream {stream}: device {device} runs the collectives "
                    f"{_numbers(found)}, but device {own[0]} runs {_numbers(first)}. All devices of a group must "
                    f"run the same collectives in one order{ADVICE} [PIPER-V003]"
                )


def _numbers(nodes: Iterable[int]) -> str:
    return ", ".join(f"%{node}" for node in nodes) or "none"


def _shapes(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}".removeprefix("torch.") for x in tensors) or "nothing"


def _name(channel: Channel) -> str:
    return f"{channel[0]}>{channel[1]}"
