"""Symbolic execution of plans, without tensors, to check that they run to the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import (
    Collective,
    Instruction,
    Irecv,
    SendInstruction,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.matching import Matching, Meeting, parties
from lightning_piper.plan.plan import Plan


class _IssueState:
    """A record of the instructions issued so far on all devices.

    A wait needs the message to be sent. The wait for a send needs the receive to be started. A wait for a
    collective needs all members. In general, a wait needs all parties to have joined the exchange that its
    node has begun. No other instruction blocks.

    If some devices represent all devices (`image`), columns run in lockstep: a member joins when its
    representative joins.

    Attributes:
        met: The exchanges that all parties have joined.
    """

    def __init__(self, image: Callable[[int], int]) -> None:
        self._matching, self._image = Matching(), image
        # members of a collective -> number of representatives among them
        self._parties: dict[tuple[int, ...], int] = {}
        self._joined: Counter[Meeting] = Counter()
        self._begun: dict[tuple[int, int], Meeting] = {}  # (device, node) -> its exchange
        self.met: set[Meeting] = set()

    def need(self, device: int, instruction: Instruction) -> Meeting | None:
        """Return the exchange that all parties must join before the instruction; None if the instruction is
        not a wait, or waits for work that did not begin."""
        return (
            self._begun.get((device, instruction.node))
            if isinstance(instruction, WaitWork | WaitSend)
            else None
        )

    def issue(self, device: int, instruction: Instruction) -> Meeting | None:
        """Issue an instruction. Returns the exchange that it completes, or None."""
        if not isinstance(instruction, SendInstruction | Irecv | Collective):
            return None
        meeting = self._begun[device, instruction.node] = self._matching.of(instruction)
        self._joined[meeting] += 1
        if self._joined[meeting] < self._needed(instruction):
            return None
        self.met.add(meeting)
        return meeting

    def _needed(self, instruction: SendInstruction | Irecv | Collective) -> int:
        if not isinstance(instruction, Collective):
            return parties(instruction)
        members = instruction.members
        if members not in self._parties:
            self._parties[members] = len(set(map(self._image, members)))
        return self._parties[members]


def run_symbolically(plans: Mapping[int, Plan], image: Callable[[int], int] = lambda device: device) -> None:
    """Run all plans until each device ends or must wait, in time linear in the number of instructions.

    Raises:
        VerificationError: Devices wait for each other. The message names the instruction in which each device
            waits.
    """
    world = _IssueState(image)
    position = dict.fromkeys(plans, 0)
    waiting: dict[Meeting, list[int]] = {}  # exchange -> devices that wait for it
    ready = deque(plans)
    while ready:
        device = ready.popleft()
        instructions = plans[device].instructions
        while position[device] < len(instructions):
            instruction = instructions[position[device]]
            need = world.need(device, instruction)
            if need is not None and need not in world.met:
                waiting.setdefault(need, []).append(device)
                break
            met = world.issue(device, instruction)
            position[device] += 1
            if met is not None:
                ready.extend(waiting.pop(met, ()))
    stuck = [device for device in plans if position[device] < len(plans[device].instructions)]
    if stuck:
        shown = "; ".join(
            f"device {d} waits in {plans[d].instructions[position[d]].where}" for d in stuck[:8]
        )
        if len(stuck) > 8:
            shown += f"; and {counted(len(stuck) - 8, 'more device')}"
        raise VerificationError(
            f"the plans deadlock: {shown}. If you changed a plan or added an operation, check its lowering. "
            "Otherwise, report this [PIPER-V004]"
        )
