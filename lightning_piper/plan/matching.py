"""Which instructions of several devices meet: said once, for all who follow plans (check, simulation, recordings, one process).

The k-th message sent on a channel meets the k-th receive started there. A collective says itself whom it meets.
"""

from __future__ import annotations

from collections import Counter

from lightning_piper.plan.instructions import Channel, Collective, Irecv, Send

# A message by its channel and number there; a collective by its node and members, for at one node several groups may meet.
Meeting = tuple[Channel | int, int | tuple[int, ...]]


class Matching:
    """Names the exchange that an instruction joins. Each device's instructions are asked for in the order of its plan."""

    def __init__(self) -> None:
        self._joined: Counter[tuple[Channel, type]] = Counter()

    def of(self, instruction: Send | Irecv | Collective) -> Meeting:
        if isinstance(instruction, Collective):
            return instruction.node, instruction.members
        side = instruction.channel, type(instruction)
        self._joined[side] += 1
        return instruction.channel, self._joined[side]


def parties(instruction: Send | Irecv | Collective) -> int:
    """How many devices join the exchange."""
    return len(instruction.members) if isinstance(instruction, Collective) else 2
