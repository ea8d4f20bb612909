"""Check that plans can finish if streams share hardware queues.

An accelerator has a fixed number of hardware queues, and assigns the queues to streams in turn. A
communicator has a stream of its own, on which a receive waits until it is matched; streams that share its
queue wait as well. If a device has at most as many communicators as queues, no two share a queue, and there
is nothing to check. (Logical streams have queues of another priority.) With more communicators, the
instructions of each queue form a chain, and messages and collectives connect the chains of several devices.
Plans can finish if the connected chains have no cycle.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import (
    Collective,
    Irecv,
    Record,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.matching import Matching
from lightning_piper.plan.plan import Plan

QUEUES = 32  # the queues of a CUDA device for streams of one priority


def check_queues(plans: Mapping[int, Plan], queues: int = QUEUES) -> None:
    """Check the plans' queues, in time linear in the instructions.

    Raises:
        VerificationError: Instructions of several devices wait for each other in queues that streams share.
    """
    if all(len(plan.channels) + len(plan.groups) <= queues for plan in plans.values()):
        return
    graph = _Graph()
    for plan in plans.values():
        _enter(plan, queues, graph)
    found = graph.circle()
    if found:
        raise VerificationError(
            f"a device has more than {queues} communicators, so some share a hardware queue. In one queue, these "
            f"collectives wait for each other: {found}. Use fewer groups of devices in the program [PIPER-V004]"
        )


class _Graph:
    """A graph of the order of instructions and exchanges. An exchange is one node for all of its parties."""

    def __init__(self) -> None:
        self._behind: dict[Hashable, list[Hashable]] = {}  # node -> the nodes directly after it
        # node that has not run -> number of nodes directly before it that have not run
        self._missing: dict[Hashable, int] = {}
        self.shown: dict[Hashable, str] = {}  # exchange -> text for a message

    def order(self, first: Hashable, second: Hashable) -> None:
        self._behind.setdefault(first, []).append(second)
        self._missing[second] = self._missing.get(second, 0) + 1
        self._missing.setdefault(first, 0)

    def circle(self) -> str:
        """Return a text about up to four exchanges that can never finish; empty if everything can run. Call
        this once, because it uses up the counts."""
        ready = [node for node, count in self._missing.items() if not count]
        while ready:
            node = ready.pop()
            del self._missing[node]
            for following in self._behind.get(node, ()):
                self._missing[following] -= 1
                if not self._missing[following]:
                    ready.append(following)
        return "; ".join([self.shown[node] for node in self._missing if node in self.shown][:4])


def _enter(plan: Plan, queues: int, graph: _Graph) -> None:
    """Add a device's chains to the graph: one for each logical stream, and one for each shared queue."""
    queue = {key: i % queues for i, key in enumerate([*plan.channels, *plan.groups])}
    last: dict[Hashable, Hashable] = {}  # chain -> its last node
    begun: dict[int, Hashable] = {}  # node -> its exchange
    events: dict[int, Hashable] = {}
    matching = Matching()

    def append(chain: Hashable, node: Hashable) -> None:
        if chain in last:
            graph.order(last[chain], node)
        last[chain] = node

    for i, instruction in enumerate(plan.instructions):
        stream, here = (plan.device, instruction.stream), (plan.device, i)
        match instruction:
            case Record():
                events[instruction.event] = last.get(stream)
            case WaitEvent():
                append(stream, here)
                if (source := events.get(instruction.event)) is not None:
                    graph.order(source, here)
            case WaitWork() | WaitSend():
                append(stream, here)
                if instruction.node in begun:
                    graph.order(begun[instruction.node], here)
            case SendInstruction() | Irecv() | Collective():
                append(stream, here)
                key = instruction.group if isinstance(instruction, Collective) else instruction.channel
                if key in queue:
                    meeting = ("meeting", matching.of(instruction))
                    begun[instruction.node] = meeting
                    graph.shown[meeting] = instruction.where
                    graph.order(here, meeting)
                    append((plan.device, queue[key]), meeting)
            case _:
                append(stream, here)
