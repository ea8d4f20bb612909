"""The transport between all devices in one process. Plans advance in turn: when one plan waits for a message,
another plan runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_piper.errors import ExecutionError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ops.base import Exchange, parts_of
from lightning_piper.plan.instructions import Collective, Irecv, SendInstruction, WaitSend, WaitWork
from lightning_piper.plan.matching import Matching, Meeting
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.executor import Executor, StepResult
from lightning_piper.runtime.piggyback import Piggyback
from lightning_piper.runtime.streams import Arrival, arrival
from lightning_piper.runtime.transport import BLOCKED, Bound, Bundle, Slots

# Holds one message; None before the message is sent and after it is taken.
Box = list[tuple[Bundle, Arrival] | None]


@dataclass
class _Collective:
    """A running collective.

    Attributes:
        brought: Logical device of a member that has started -> its parts, and the point from which the other
            members may read the parts.
        taken: The number of members that have taken their result.
    """

    brought: dict[int, tuple[Sequence[Any], Arrival]] = field(default_factory=dict)
    taken: int = 0

    def clear(self) -> None:
        self.brought.clear()
        self.taken = 0


class LocalTransport:
    """A transport between the plans of all devices in one process. Make one for each set of plans.

    A message is the sender's own tensor. The receiver may read this tensor at any time, because no plan
    changes a value in place that another device could hold.
    """

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.messages: dict[Meeting, Box] = {}
        self.collectives: dict[Meeting, _Collective] = {}
        matching = Matching()
        for plan in plans.values():
            self.collectives |= {
                matching.of(i): _Collective() for i in plan.instructions if isinstance(i, Collective)
            }

    def box(self, meeting: Meeting) -> Box:
        """Return the box that holds a message on its way from sender to receiver."""
        return self.messages.setdefault(meeting, [None])

    def endpoint(self, plan: Plan, device: torch.device) -> LocalEndpoint:
        return LocalEndpoint(self, plan, device)


class LocalEndpoint:
    """The endpoint of one device (see `transport.RidingEndpoint`). It has no piggyback, because no message
    leaves the process.
    """

    hands_over = True
    piggyback: Piggyback | None = None

    def vote_abort(self) -> None: ...

    def flat(self, bucket: Bucket) -> torch.Tensor:
        return bucket.empty(self._device)

    def __init__(self, transport: LocalTransport, plan: Plan, device: torch.device) -> None:
        self._transport, self._plan, self._device = transport, plan, device
        self._matching = Matching()
        self._irecv: dict[int, Meeting] = {}  # node of the receive -> its message
        # node of a collective -> its meeting, instruction and exchange
        self._meet: dict[int, tuple[Meeting, Collective, Exchange]] = {}
        # collective -> state of the exchange, from the start of the collective to the wait for it
        self._state: dict[int, Any] = {}

    def reset(self) -> None:
        for box in self._transport.messages.values():
            box[0] = None
        for meeting, *_ in self._meet.values():
            self._transport.collectives[meeting].clear()

    def send(self, instruction: SendInstruction, slots: Slots) -> Bound:
        """Return the function that puts the sent bundle itself, without a copy, into the message's box."""
        box = self._transport.box(self._matching.of(instruction))
        source, last = instruction.reads[0].slot, instruction.reads[0].last
        mark = arrival(self._device)

        def send() -> None:
            mark.record()
            box[0] = (slots[source], mark)
            if last:
                slots[source] = None

        return send

    def wait_send(self, instruction: WaitSend) -> None:
        return None

    def irecv(self, instruction: Irecv, slots: Slots) -> None:
        self._irecv[instruction.node] = self._matching.of(instruction)

    def collective(self, instruction: Collective, exchange: Exchange, slots: Slots) -> Bound:
        """Return the function that offers this member's parts to the other members."""
        meeting, member = self._matching.of(instruction), self._plan.device
        brought = self._transport.collectives[meeting].brought
        self._meet[instruction.node] = (meeting, instruction, exchange)
        states, node, mark = self._state, instruction.node, arrival(self._device)
        count = len(instruction.members)

        def start() -> None:
            state = states[node] = exchange.bring()
            parts = parts_of(exchange, state, count)
            mark.record()
            brought[member] = (parts, mark)

        return start

    def wait(self, instruction: WaitWork, slots: Slots) -> Bound:
        """Return the function that takes a message, or the result of a collective. It returns `BLOCKED` if
        another device must run first.

        Raises:
            ExecutionError: Neither `irecv` nor `collective` was called for the node.
        """
        if instruction.node in self._meet:
            return self._wait_for_all(instruction, slots)
        if instruction.node not in self._irecv:
            raise ExecutionError(
                f"device {self._plan.device}: {instruction.where} has nothing to wait for: no endpoint "
                "started it. If you added an operation, start its communication before the wait. Otherwise, "
                "report this [PIPER-X001]"
            )
        box, slot, device = self._transport.box(self._irecv[instruction.node]), instruction.into, self._device

        def wait() -> object:
            message = box[0]
            if message is None:
                return BLOCKED
            box[0] = None
            slots[slot] = message[1].take(message[0], device)
            return None

        return wait

    def _wait_for_all(self, instruction: WaitWork, slots: Slots) -> Bound:
        """Return the function that waits for the parts of all members of a collective, and joins them."""
        node, slot, device, states = instruction.node, instruction.into, self._device, self._state
        meeting, collective, exchange = self._meet[node]
        here = self._transport.collectives[meeting]
        members, own = collective.members, collective.members.index(self._plan.device)

        def wait() -> object:
            if len(here.brought) < len(members):
                return BLOCKED
            parts = [
                _taken(brought[own], mark, device)
                for brought, mark in (here.brought[member] for member in members)
            ]
            slots[slot] = exchange.join(states.pop(node), parts)
            here.taken += 1
            if here.taken == len(members):
                here.clear()
            return None

        return wait


def _taken(part: Any, mark: Arrival, device: torch.device) -> Any:
    """Return a part that a member offers, on `device`. The part is a tensor or a bundle, and so is the
    result."""
    return mark.take(part, device) if isinstance(part, tuple) else mark.take((part,), device)[0]


def run_local(
    executors: Sequence[Executor],
    leaves: Sequence[torch.Tensor],
    seed: int,
    scale: float = 1.0,
    last: bool = True,
) -> list[StepResult]:
    """Run one step of all devices, whose executors share one `LocalTransport`. Returns the results in the
    order of `executors`.

    Args:
        executors: One for each logical device.
        leaves: The tensors of the global batch.
        seed, scale, last: See `Executor.step`.

    Raises:
        ExecutionError: An instruction failed, or all devices wait for each other.
    """
    for executor in executors:
        plan = executor.plan
        first = plan.replica * plan.local_batch_size
        local_batch = (
            leaves
            if plan.replicas == 1
            else [x.narrow(0, first, plan.local_batch_size) if x.ndim else x for x in leaves]
        )
        executor.begin(local_batch, seed, scale, last)
    running = list(executors)
    while running:
        before = [executor.position for executor in running]
        waiting = [executor for executor in running if not executor.advance()]
        if len(waiting) == len(running) and before == [executor.position for executor in running]:
            raise ExecutionError(
                f"the devices wait for each other: {'; '.join(e.waiting_for for e in waiting)}. If you "
                "changed a plan, check the order of its sends and receives. If you added an operation, check its lowering. "
                "Otherwise, report this [PIPER-V004]"
            )
        running = waiting
    return [executor.end() for executor in executors]
