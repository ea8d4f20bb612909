"""Plans run without tensors, to find out whether they can run to the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import Collective, Instruction, Irecv, Send, WaitSend, WaitWork
from lightning_piper.plan.matching import Matching, Meeting, parties
from lightning_piper.plan.plan import Plan


class _World:
    """What has been issued so far on all devices.

    A wait needs the message to have been sent; the wait for a send needs the receive to have been started; a collective needs all
    members: each needs all parties of the exchange that its node has begun. Nothing else blocks.

    Where some devices stand for all (`image`), all columns run in step: a member has joined when the one that stands for it has.
    """

    def __init__(self, image: Callable[[int], int]) -> None:
        self._matching, self._image = Matching(), image
        self._parties: dict[tuple[int, ...], int] = {}  # of the members of a collective
        self._joined: Counter[Meeting] = Counter()
        self._begun: dict[tuple[int, int], Meeting] = {}  # (device, node) -> its exchange
        self.met: set[Meeting] = set()

    def need(self, device: int, instruction: Instruction) -> Meeting | None:
        """The exchange that all parties must have joined before the instruction can run, or None."""
        return self._begun.get((device, instruction.node)) if isinstance(instruction, WaitWork | WaitSend) else None

    def issue(self, device: int, instruction: Instruction) -> Meeting | None:
        """Issue the instruction; returns the exchange that all parties have joined now, if there is one."""
        if not isinstance(instruction, Send | Irecv | Collective):
            return None
        meeting = self._begun[device, instruction.node] = self._matching.of(instruction)
        self._joined[meeting] += 1
        if self._joined[meeting] < self._needed(instruction):
            return None
        self.met.add(meeting)
        return meeting

    def _needed(self, instruction: Send | Irecv | Collective) -> int:
        if not isinstance(instruction, Collective):
            return parties(instruction)
        members = instruction.members
        if members not in self._parties:
            self._parties[members] = len(set(map(self._image, members)))
        return self._parties[members]


def run_symbolically(plans: Mapping[int, Plan], image: Callable[[int], int] = lambda device: device) -> None:
    """Run all plans; a device that must wait lets others go on. Linear in the number of instructions.

    Raises:
        VerificationError: devices wait for each other; names what each of them waits for.
    """
    world = _World(image)
    position = dict.fromkeys(plans, 0)
    waiting: dict[Meeting, list[int]] = {}
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
        shown = "; ".join(f"device {d} waits in {plans[d].instructions[position[d]].where}" for d in stuck)
        raise VerificationError(f"the plans deadlock: {shown}")
