"""Runs plans in virtual time.

Each logical stream of a device has a clock. Instructions are issued in the plan's order. Each starts when its
stream is free, and advances the clock. Issuing takes no time, as on CUDA, where the host runs ahead of its
streams::

    chunks, sums and the like    occupy their stream for their duration
    send, post, collectives      join an exchange without waiting. An exchange starts when all parties have
                                 joined it and the previous one on its channel or in its group is over
    wait, retire                 hold the stream until the exchange of the same node is over
    record, await                an awaiting stream is held until the recorded moment

To find the waiting time that is due to communication alone, a clock also has `since`. This is the last moment
at which something other than communication delayed the stream. A stream that is held until t, with `since` s,
waited from s to t for communication only, because at s everything that it waited for had been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan.check import ADVICE
from lightning_piper.plan.instructions import (
    Collective,
    HostCopy,
    Instruction,
    Irecv,
    Record,
    Run,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.matching import Matching, Meeting, parties
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number, WorkDurations
from lightning_piper.simulate.network import Network

Interval = tuple[Number, Number]
Lane = tuple[str, object]  # a channel or a group


def lane_of(instruction: SendInstruction | Irecv | Collective) -> Lane:
    """Return the channel or group on which exchanges take turns."""
    return (
        ("group", instruction.group)
        if isinstance(instruction, Collective)
        else ("channel", instruction.channel)
    )


class Span(NamedTuple):
    """The work of a stream from `start` to `end`.

    Work that takes no time has a span if it is a chunk or communication.

    Attributes:
        kind: The pass of a chunk (`F`, `B`, ...), or the operation: `send`, `recv`, `reduce`, `add` and so
            on.
        origin: The index of the directive that made the node.
    """

    device: int
    stream: str
    start: Number
    end: Number
    node: int
    label: str
    kind: str
    origin: int | None


class StreamWait(NamedTuple):
    """A wait of a stream from `start` to `end` for the result of `node`.

    Attributes:
        since: From this time on, the stream waits for communication only.
        origin: The index of the directive that made `node`.
    """

    device: int
    stream: str
    start: Number
    since: Number
    end: Number
    node: int
    origin: int | None


@dataclass
class Trace:
    """The events of a simulated or recorded step.

    Attributes:
        spans: The spans in order of issue.
        times: Maps each device to the start and end of every instruction of its plan.
        held: The waits of streams.
        end: The end of the last stream.
    """

    spans: list[Span] = field(default_factory=list)
    times: dict[int, list[Interval]] = field(default_factory=dict)
    held: list[StreamWait] = field(default_factory=list)
    end: Number = 0


@dataclass(slots=True)
class _Clock:
    time: Number = 0
    since: Number = 0

    def hold(self, until: Number, since: Number) -> None:
        """Advance the clock to `until`, and its `since` to the given time, unless they are later already."""
        self.time = max(self.time, until)
        self.since = max(self.since, since)


@dataclass(slots=True)
class _PendingExchange:
    """One message or one collective.

    Attributes:
        lane: The channel or group, which carries one exchange at a time.
        parties: The number of devices that must join.
        joined: (device, instruction) of the devices that have joined.
        ready: The time at which the last device joined.
        since: From this time on, only communication delayed the last device that joined.
        waiting: Devices that cannot continue before all have joined.
    """

    lane: Lane
    parties: int
    joined: list[tuple[int, Instruction]] = field(default_factory=list)
    ready: Number = 0
    since: Number = 0
    end: Number = 0
    waiting: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.joined) == self.parties


class _SimulatedDevices:
    """The clocks, events and exchanges of all devices."""

    def __init__(
        self, dag: TrainingDAG, plans: Mapping[int, Plan], work: WorkDurations, network: Network
    ) -> None:
        self._dag, self._work, self._network = dag, work, network
        self.trace = Trace(times={device: [] for device in plans})
        self._clocks: dict[tuple[int, str], _Clock] = {}
        # (device, event) -> (time, since), node
        self._events: dict[tuple[int, int], tuple[Interval, int]] = {}
        self._matching = Matching()
        self._exchanges: dict[Meeting, _PendingExchange] = {}
        self._started: dict[tuple[int, int], _PendingExchange] = {}  # (device, node)
        self._free: dict[Lane, Number] = {}  # lane -> end of its last exchange

    def blocked(self, device: int, instruction: Instruction) -> _PendingExchange | None:
        """Return the exchange whose other parties must join before the instruction can be issued, or None."""
        if not isinstance(instruction, WaitWork | WaitSend):
            return None
        exchange = self._started.get((device, instruction.node))
        if exchange is None:
            raise VerificationError(
                f"plan of device {device}: {instruction.where}: no earlier instruction started the work for "
                f"which it waits{ADVICE} [PIPER-V003]"
            )
        return None if exchange.complete else exchange

    def issue(self, device: int, instruction: Instruction) -> list[int]:
        """Issue an instruction. Returns the devices that can now continue."""
        clock = self._clocks.setdefault((device, instruction.stream), _Clock())
        start, freed = clock.time, list[int]()
        match instruction:
            case WaitWork():
                exchange = self._started[device, instruction.node]
                self._hold(device, instruction, clock, (exchange.end, exchange.since), instruction.node)
            case WaitSend():
                # Nothing here needs the sent value, so this wait does not count as waiting for communication.
                end = self._started[device, instruction.node].end
                self._hold(device, instruction, clock, (end, end), instruction.node)
            case SendInstruction() | Irecv() | Collective():
                freed = self._join(device, instruction, clock, self._exchange(instruction))
            case Record():
                self._events[device, instruction.event] = ((clock.time, clock.since), instruction.node)
            case WaitEvent():
                if (device, instruction.event) not in self._events:
                    raise VerificationError(
                        f"plan of device {device}: {instruction.where}: it waits for event "
                        f"e{instruction.event} before this event is recorded{ADVICE} [PIPER-V003]"
                    )
                self._hold(device, instruction, clock, *self._events[device, instruction.event])
            case _:
                self._occupy(device, instruction, clock)
        self.trace.times[device].append((start, clock.time))
        self.trace.end = max(self.trace.end, clock.time)
        return freed

    def _hold(
        self, device: int, instruction: Instruction, clock: _Clock, moment: Interval, node: int
    ) -> None:
        """Hold a stream until the time in `moment`, and record the wait for `node` if there is one."""
        before = clock.time
        clock.hold(*moment)
        if clock.time > before:
            since = min(max(before, clock.since), clock.time)
            about = (device, instruction.stream, before, since, clock.time)
            self.trace.held.append(StreamWait(*about, node, self._dag.nodes[node].origin))

    def _occupy(self, device: int, instruction: Instruction, clock: _Clock) -> None:
        """Let an instruction occupy its stream for its duration, and record its span."""
        copying = self._network.host.time(instruction.nbytes) if isinstance(instruction, HostCopy) else 0
        start, duration = clock.time, self._work.of(instruction, copying)
        if duration:
            clock.time = clock.since = start + duration
        if duration or isinstance(instruction, Run):
            node = self._dag.nodes[instruction.node]
            kind = node.kind if isinstance(node, Chunk) else instruction.op
            self._span(device, instruction, kind, start, clock.time)

    def _span(self, device: int, instruction: Instruction, kind: str, start: Number, end: Number) -> None:
        about = (instruction.node, instruction.label, kind, instruction.origin)
        self.trace.spans.append(Span(device, instruction.row, start, end, *about))

    def _exchange(self, instruction: SendInstruction | Irecv | Collective) -> _PendingExchange:
        """Return the message or collective to which an instruction belongs."""
        meeting = self._matching.of(instruction)
        if meeting not in self._exchanges:
            self._exchanges[meeting] = _PendingExchange(lane_of(instruction), parties(instruction))
        return self._exchanges[meeting]

    def _join(
        self, device: int, instruction: Instruction, clock: _Clock, exchange: _PendingExchange
    ) -> list[int]:
        """Let a device join an exchange. If it is the last one, determine when the exchange starts and ends,
        and return the devices that wait for it. Otherwise return an empty list."""
        self._started[device, instruction.node] = exchange
        exchange.joined.append((device, instruction))
        exchange.ready = max(exchange.ready, clock.time)
        exchange.since = max(exchange.since, clock.since)
        if not exchange.complete:
            return []
        start = max(exchange.ready, self._free.get(exchange.lane, 0))
        exchange.end = self._free[exchange.lane] = start + self._duration(exchange)
        for member, joined in exchange.joined:
            self._span(
                member, joined, "recv" if isinstance(joined, Irecv) else joined.op, start, exchange.end
            )
        return exchange.waiting

    def _duration(self, exchange: _PendingExchange) -> Number:
        instruction: Any = next(joined for _, joined in exchange.joined if not isinstance(joined, Irecv))
        measured = self._work.measured(instruction.node)
        if measured is not None:
            return measured
        if isinstance(instruction, Collective):
            return self._network.collective(instruction)
        return self._network.transfer(instruction.channel, sum(spec.nbytes for spec in instruction.tensors))


def run_in_virtual_time(
    dag: TrainingDAG, plans: Mapping[int, Plan], work: WorkDurations, network: Network
) -> Trace:
    """Run the plans of all devices in virtual time.

    This takes time linear in the number of instructions, and the same plans always give the same trace.

    Raises:
        VerificationError: Devices wait for each other. The message names the instruction of each.
    """
    world = _SimulatedDevices(dag, plans, work, network)
    position = dict.fromkeys(plans, 0)
    ready = deque(plans)
    while ready:
        device = ready.popleft()
        instructions = plans[device].instructions
        while position[device] < len(instructions):
            instruction = instructions[position[device]]
            exchange = world.blocked(device, instruction)
            if exchange is not None:
                exchange.waiting.append(device)
                break
            position[device] += 1
            ready.extend(world.issue(device, instruction))
    stuck = [device for device in plans if position[device] < len(plans[device].instructions)]
    if stuck:
        shown = "; ".join(f"device {d} waits in {plans[d].instructions[position[d]].where}" for d in stuck)
        raise VerificationError(
            f"the plans deadlock: {shown}. Remove or reverse an order that lists one of these passes "
            "[PIPER-V004]"
        )
    return world.trace
