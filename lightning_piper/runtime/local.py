"""All devices in one process: plans advance in turn, and a receive that is not there yet lets another plan go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_piper.errors import ExecutionError
from lightning_piper.ops.base import Exchange
from lightning_piper.plan.instructions import Channel, Collective, Post, Retire, Send, Wait
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.executor import Executor, StepResult
from lightning_piper.runtime.streams import Arrival, arrival
from lightning_piper.runtime.transport import BLOCKED, Bound, Bundle, Slots


@dataclass
class _Meeting:
    """One collective: what each member brought, and how many have taken their parts of it."""

    brought: dict[int, tuple[Sequence[Any], Arrival]] = field(default_factory=dict)
    taken: int = 0


class LocalTransport:
    """Connects the plans of all devices of one step, in one process. One for each set of plans.

    A message is the sender's own tensor: no plan changes a value in place that another device could hold.
    """

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        # The k-th message sent on a channel meets the k-th receive posted there, as it does between processes.
        self.messages: dict[Channel, list[tuple[Bundle, Arrival] | None]] = {}
        self.meetings: dict[tuple[int, tuple[int, ...]], _Meeting] = {}  # by node and members: several groups may meet at one node
        for plan in plans.values():
            for instruction in plan.instructions:
                if isinstance(instruction, Send):
                    self.messages.setdefault(instruction.channel, []).append(None)
                elif isinstance(instruction, Collective):
                    self.meetings.setdefault(instruction.meeting, _Meeting())

    def endpoint(self, plan: Plan, device: torch.device) -> LocalEndpoint:
        return LocalEndpoint(self, plan, device)


class LocalEndpoint:
    """See `transport.Endpoint`."""

    hands_over = True

    def __init__(self, transport: LocalTransport, plan: Plan, device: torch.device) -> None:
        self._transport, self._plan, self._device = transport, plan, device
        self._sent: dict[Channel, int] = {}
        self._posted: dict[Channel, int] = {}
        self._post: dict[int, tuple[Channel, int]] = {}  # node -> its message
        self._meet: dict[int, tuple[tuple[int, ...], Exchange]] = {}  # collective -> its members, and what this one does there
        self._state: dict[int, Any] = {}  # collective -> state of the exchange, from its start to the wait

    def reset(self) -> None:
        for channel, messages in self._transport.messages.items():
            if self._plan.device in channel:
                messages[:] = [None] * len(messages)
        for node, (members, _) in self._meet.items():
            self._transport.meetings[node, members] = _Meeting()

    def send(self, instruction: Send, slots: Slots) -> Bound:
        messages = self._transport.messages[instruction.channel]
        number = self._sent.get(instruction.channel, 0)
        self._sent[instruction.channel] = number + 1
        source, last = instruction.reads[0].slot, instruction.reads[0].last
        mark = arrival(self._device)

        def send() -> None:
            mark.record()
            messages[number] = (slots[source], mark)
            if last:
                slots[source] = None

        return send

    def retire(self, instruction: Retire) -> None:
        return None

    def post(self, instruction: Post, slots: Slots) -> None:
        number = self._posted.get(instruction.channel, 0)
        self._posted[instruction.channel] = number + 1
        self._post[instruction.node] = (instruction.channel, number)

    def collective(self, instruction: Collective, exchange: Exchange, slots: Slots) -> Bound:
        meetings, place, member = self._transport.meetings, instruction.meeting, self._plan.device
        self._meet[instruction.node] = (instruction.members, exchange)
        states, node, mark = self._state, instruction.node, arrival(self._device)

        def start() -> None:
            state = states[node] = exchange.bring()
            parts = exchange.parts(state)
            mark.record()
            meetings[place].brought[member] = (parts, mark)

        return start

    def wait(self, instruction: Wait, slots: Slots) -> Bound:
        if instruction.node in self._meet:
            return self._wait_for_all(instruction, slots)
        if instruction.node not in self._post:
            raise ExecutionError(f"device {self._plan.device}: {instruction.where} has nothing to wait for: no endpoint started it")
        channel, number = self._post[instruction.node]
        messages, slot, device = self._transport.messages[channel], instruction.into, self._device

        def wait() -> object:
            message = messages[number] if number < len(messages) else None
            if message is None:
                return BLOCKED
            messages[number] = None
            slots[slot] = message[1].take(message[0], device)
            return None

        return wait

    def _wait_for_all(self, instruction: Wait, slots: Slots) -> Bound:
        transport, node, slot, device, states = self._transport, instruction.node, instruction.into, self._device, self._state
        members, exchange = self._meet[node]
        place, own = (node, members), members.index(self._plan.device)

        def wait() -> object:
            meeting = transport.meetings[place]
            if len(meeting.brought) < len(members):
                return BLOCKED
            parts = [_taken(brought[own], mark, device) for brought, mark in (meeting.brought[member] for member in members)]
            slots[slot] = exchange.join(states.pop(node), parts)
            meeting.taken += 1
            if meeting.taken == len(members):
                transport.meetings[place] = _Meeting()
            return None

        return wait


def _taken(part: Any, mark: Arrival, device: torch.device) -> Any:
    """A part of a collective, a tensor or a bundle, on this device."""
    return mark.take(part, device) if isinstance(part, tuple) else mark.take((part,), device)[0]


def run_local(
    executors: Sequence[Executor], leaves: Sequence[torch.Tensor], seed: int, scale: float = 1.0, last: bool = True
) -> list[StepResult]:
    """One step of all devices, whose executors share one `LocalTransport`.

    Args:
        executors: one for each logical device.
        leaves: of the global batch.
        seed, scale, last: as in `Executor.step`.

    Raises:
        ExecutionError: an instruction failed, or all devices wait for each other.
    """
    for executor in executors:
        plan = executor.plan
        first = plan.replica * plan.share
        share = leaves if plan.replicas == 1 else [x.narrow(0, first, plan.share) if x.ndim else x for x in leaves]
        executor.begin(share, seed, scale, last)
    running = list(executors)
    while running:
        before = [executor.position for executor in running]
        waiting = [executor for executor in running if not executor.advance()]
        if len(waiting) == len(running) and before == [executor.position for executor in running]:
            raise ExecutionError("the devices wait for each other: " + "; ".join(e.waiting_for for e in waiting))
        running = waiting
    return [executor.end() for executor in executors]
