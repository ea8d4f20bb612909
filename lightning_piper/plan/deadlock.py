"""Plans run without tensors, to find out whether they can run to the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import Channel, Collective, Instruction, Irecv, Send, WaitSend, WaitWork
from lightning_piper.plan.plan import Plan

_Need = tuple[object, ...]


class _World:
    """What has been issued so far on all devices.

    A wait needs the message to have been sent; the wait for a send needs the receive to have been started; a collective needs all
    members. Nothing else blocks.
    """

    def __init__(self) -> None:
        self._sent: dict[Channel, int] = {}
        self._started: dict[Channel, int] = {}
        self._members: dict[tuple[object, ...], int] = {}
        self._number: dict[tuple[int, int], _Need] = {}  # (device, node) -> what its wait needs
        self.done: set[_Need] = set()

    def need(self, device: int, instruction: Instruction) -> _Need | None:
        """What must have happened before the instruction can run, or None."""
        if isinstance(instruction, WaitWork | WaitSend):
            return self._number.get((device, instruction.node))
        return None

    def issue(self, device: int, instruction: Instruction) -> _Need | None:
        """Issue the instruction; returns what has now happened, if anything waits for such."""
        key = (device, instruction.node)
        happened: _Need | None = None
        if isinstance(instruction, Send):
            number = self._sent[instruction.channel] = self._sent.get(instruction.channel, 0) + 1
            self._number[key] = ("posted", instruction.channel, number)
            happened = ("sent", instruction.channel, number)
        elif isinstance(instruction, Irecv):
            number = self._started[instruction.channel] = self._started.get(instruction.channel, 0) + 1
            self._number[key] = ("sent", instruction.channel, number)
            happened = ("posted", instruction.channel, number)
        elif isinstance(instruction, Collective):
            meeting = self._number[key] = ("met", *instruction.meeting)
            count = self._members[meeting] = self._members.get(meeting, 0) + 1
            if count == len(instruction.members):
                happened = meeting
        if happened is not None:
            self.done.add(happened)
        return happened


def run_symbolically(plans: Mapping[int, Plan]) -> None:
    """Run all plans; a device that must wait lets others go on. Linear in the number of instructions.

    Raises:
        VerificationError: devices wait for each other; names what each of them waits for.
    """
    world = _World()
    position = dict.fromkeys(plans, 0)
    waiting: dict[_Need, list[int]] = {}
    ready = deque(plans)
    while ready:
        device = ready.popleft()
        instructions = plans[device].instructions
        while position[device] < len(instructions):
            instruction = instructions[position[device]]
            need = world.need(device, instruction)
            if need is not None and need not in world.done:
                waiting.setdefault(need, []).append(device)
                break
            happened = world.issue(device, instruction)
            position[device] += 1
            if happened is not None:
                ready.extend(waiting.pop(happened, ()))
    stuck = [device for device in plans if position[device] < len(plans[device].instructions)]
    if stuck:
        shown = "; ".join(f"device {d} waits in {plans[d].instructions[position[d]].where}" for d in stuck)
        raise VerificationError(f"the plans deadlock: {shown}")
