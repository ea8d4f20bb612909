"""The matching of instructions on several devices, which checks, simulation, recordings and transports share.

The k-th message sent on a channel meets the k-th receive started on it. A collective names its members
itself.
"""

from __future__ import annotations

from collections import Counter

from lightning_piper.plan.instructions import Channel, Collective, Irecv, SendInstruction

# Name of an exchange. Of a message: (channel, number of the message in the channel, from 1 on). Of a
# collective: (node, members), because several groups may run the collective of one node.
Meeting = tuple[Channel | int, int | tuple[int, ...]]


class Matching:
    """A counter that names the exchange which an instruction joins.

    Call `of` for each device's instructions in the order of the plan, because it counts messages.
    """

    def __init__(self) -> None:
        self._joined: Counter[tuple[Channel, type]] = Counter()

    def of(self, instruction: SendInstruction | Irecv | Collective) -> Meeting:
        if isinstance(instruction, Collective):
            return instruction.node, instruction.members
        side = instruction.channel, type(instruction)
        self._joined[side] += 1
        return instruction.channel, self._joined[side]


def parties(instruction: SendInstruction | Irecv | Collective) -> int:
    """Return the number of devices that join the exchange."""
    return len(instruction.members) if isinstance(instruction, Collective) else 2
