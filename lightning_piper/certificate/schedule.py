"""A time for each instruction of all plans, which shows that no devices wait for each other forever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import (
    Channel,
    Collective,
    Group,
    Irecv,
    SendInstruction,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.matching import Matching, Meeting, parties
from lightning_piper.plan.plan import Plan


class IssueTime(NamedTuple):
    """When an instruction runs.

    Attributes:
        time: Larger than the times of all instructions that must run before it. Unique in all plans.
        number: Index of the message in its channel, or of the collective in its group. None for
            instructions that neither send, receive nor start a collective.
    """

    time: int
    number: int | None


def moments(plans: Mapping[int, Plan]) -> dict[int, list[IssueTime]]:
    """Return a moment for each instruction of each device.

    A wait runs after all parties of its exchange have started the exchange. Takes time linear in the number
    of instructions.

    Raises:
        VerificationError: Devices wait for each other in a circle.
    """
    matching, joined = Matching(), Counter[Meeting]()
    begun: dict[tuple[int, int], tuple[Meeting, int]] = {}  # (device, node) -> exchange, number of parties
    numbers: Counter[tuple[int, Channel | Group, bool]] = Counter()
    waiting: defaultdict[Meeting, list[int]] = defaultdict(list)
    made: dict[int, list[IssueTime]] = {device: [] for device in plans}
    ready, time = deque(plans), 0
    while ready:
        device = ready.popleft()
        for instruction in plans[device].instructions[len(made[device]) :]:
            number = None
            if isinstance(instruction, WaitWork | WaitSend):
                meeting, count = begun[device, instruction.node]
                if joined[meeting] < count:
                    waiting[meeting].append(device)
                    break
            elif isinstance(instruction, SendInstruction | Irecv | Collective):
                meeting = matching.of(instruction)
                begun[device, instruction.node] = meeting, parties(instruction)
                joined[meeting] += 1
                ready.extend(waiting.pop(meeting, ()))
                where = instruction.group if isinstance(instruction, Collective) else instruction.channel
                key = (device, where, isinstance(instruction, Irecv))
                number = numbers[key]
                numbers[key] += 1
            made[device].append(IssueTime(time, number))
            time += 1
    stuck = [device for device in plans if len(made[device]) < len(plans[device].instructions)]
    if stuck:
        raise VerificationError(
            f"the plans of devices {stuck} wait for each other, so they have no certificate. Run "
            "`lightning-piper check`, which names the instructions [PIPER-V004]"
        )
    return made
