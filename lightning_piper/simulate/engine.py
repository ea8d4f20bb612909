"""Run plans in virtual time. `run_in_virtual_time` returns a trace, from which `figures` computes the
figures.

Each logical stream of a device has a clock. Instructions are issued in the plan's order. Each instruction
starts when its stream is free, and advances the clock. Without an `IssueCost`, issuing takes no time, as on
CUDA, where the host runs ahead of its streams::

    chunks, sums and the like    occupy their stream for their duration
    send, post, collectives      join an exchange (a message or a collective) without waiting. It starts when
                                 all of its devices have joined it and the previous exchange on its channel
                                 or in its group is over
    wait, retire                 hold the stream until the exchange of the same node is over
    record, await                an awaiting stream is held until the recorded moment

To find the waiting time that is due to communication alone, a clock also has `since`. This is the last moment
at which something other than communication delayed the stream. If a stream is held until t, and its `since`
is s, the stream waited from s to t for communication only: all computations for which it waited were done at
s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan.checks.plan_check import ADVICE
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
from lightning_piper.simulate.contention import Traffic, Transfer
from lightning_piper.simulate.durations import Number, WorkDurations
from lightning_piper.simulate.issue_cost import IssueCost
from lightning_piper.simulate.network import Network, Phase

Interval = tuple[Number, Number]
Lane = tuple[str, object]  # ("channel", a channel) or ("group", a group)


def lane_of(instruction: SendInstruction | Irecv | Collective) -> Lane:
    """Return the channel or group that carries the exchange. It carries one exchange at a time."""
    return (
        ("group", instruction.group)
        if isinstance(instruction, Collective)
        else ("channel", instruction.channel)
    )


class Span(NamedTuple):
    """The work of a stream of a device from `start` to `end`.

    Chunks and communication have a span even if they take no time.

    Attributes:
        stream: The stream, or for a collective its communicator.
        node: The number of the node in the DAG.
        label: The label of the node, such as `F[PP=0,MB=1]`.
        kind: The pass of a chunk (`F`, `B`, ...), or the operation: `send`, `recv`, `reduce`, `add` and so
            on.
        origin: The index of the directive that made the node; None if the capture made it.
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
    """A wait of a stream of a device from `start` to `end` for the result of `node`.

    Attributes:
        since: From this time on, the stream waits for communication only.
        origin: The index of the directive that made `node`; None if the capture made it.
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
    """The work and the waits of all streams in a simulated or recorded step.

    Attributes:
        spans: The spans, in no particular order.
        times: Device -> (start, end) of each instruction of its plan.
        held: The times in which streams waited.
        end: The end of the last stream.
    """

    spans: list[Span] = field(default_factory=list)
    times: dict[int, list[Interval]] = field(default_factory=dict)
    held: list[StreamWait] = field(default_factory=list)
    end: Number = 0


@dataclass(slots=True)
class _Clock:
    """The time that a stream has reached, and `since` as the module's docstring defines it."""

    time: Number = 0
    since: Number = 0

    def hold(self, until: Number, since: Number) -> None:
        """Advance `time` to `until`, and the clock's `since` to the argument. Neither ever goes back."""
        self.time = max(self.time, until)
        self.since = max(self.since, since)


@dataclass(slots=True)
class _Stream:
    """A stream of a device.

    Attributes:
        clock: The clock of the stream.
        issued: (position in the plan, instruction) of the instructions that have been issued and have not
            begun. The first one waits for an exchange or an event.
    """

    device: int
    clock: _Clock = field(default_factory=_Clock)
    issued: deque[tuple[int, Instruction]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _PendingExchange:
    """One message or one collective.

    Attributes:
        lane: The channel or group, which carries one exchange at a time.
        parties: The number of devices that must join.
        joined: (device, instruction) of each device that has issued its instruction for the exchange.
        arrived: The number of devices whose streams have reached their instruction for the exchange.
        ready: The latest time so far at which a stream reached its instruction.
        since: The latest time so far at which something other than communication delayed one of these
            streams.
        end: The end; None if it is not known yet.
        waiting: Devices that cannot issue their next instruction before all parties have joined.
        held: Streams that wait until `end` is known.
    """

    lane: Lane
    parties: int
    joined: list[tuple[int, Instruction]] = field(default_factory=list)
    arrived: int = 0
    ready: Number = 0
    since: Number = 0
    end: Number | None = None
    waiting: list[int] = field(default_factory=list)
    held: list[_Stream] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.joined) == self.parties


@dataclass(slots=True)
class _Queue:
    """The exchanges of a channel or group.

    Attributes:
        exchanges: The exchanges that all parties have joined and that are not over, in order.
        under_way: Whether `Traffic` carries the first exchange.
        free: The end of the last exchange that is over.
    """

    exchanges: deque[_PendingExchange] = field(default_factory=deque)
    under_way: bool = False
    free: Number = 0


class _SimulatedDevices:
    """The clocks, events and exchanges of all devices."""

    def __init__(
        self,
        dag: TrainingDAG,
        plans: Mapping[int, Plan],
        work: WorkDurations,
        network: Network,
        issue: IssueCost | None,
    ) -> None:
        """Prepare devices that have issued nothing."""
        self._dag, self._work, self._network = dag, work, network
        # Device -> the time at which each instruction has been issued. None: issuing takes no time.
        self._ready_at = None if issue is None else issue.times(plans)
        self.trace = Trace(times={device: [] for device in plans})
        self._streams: dict[tuple[int, str], _Stream] = {}  # (device, name of the stream)
        # (device, event) -> ((time, since), node) of its `Record`. None: the `Record` has been issued and has
        # not begun.
        self._events: dict[tuple[int, int], tuple[Interval, int] | None] = {}
        self._awaiting: dict[tuple[int, int], list[_Stream]] = {}  # (device, event) -> streams that wait
        self._matching = Matching()
        self._exchanges: dict[Meeting, _PendingExchange] = {}
        self._started: dict[tuple[int, int], _PendingExchange] = {}  # (device, node) -> exchange
        self._queues: dict[Lane, _Queue] = {}
        # None: exchanges do not delay each other, except on one channel or group.
        self._traffic = Traffic(network) if network.shared or network.communicators else None
        self._going_on: deque[_Stream] = deque()  # streams that need not wait any longer

    def blocked(self, device: int, instruction: Instruction) -> _PendingExchange | None:
        """Return the exchange that other parties must join before the instruction can be issued. None: it can
        be issued now.

        Raises:
            VerificationError: No earlier instruction started the exchange.
        """
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
        """Issue an instruction, and begin all instructions that can begin now.

        Returns:
            The devices that waited in `blocked` for this instruction, and can now continue.

        Raises:
            VerificationError: The instruction waits for an event that has not been recorded.
        """
        stream = self._streams.setdefault((device, instruction.stream), _Stream(device))
        freed = list[int]()
        match instruction:
            case SendInstruction() | Irecv() | Collective():
                exchange = self._started[device, instruction.node] = self._exchange(instruction)
                exchange.joined.append((device, instruction))
                if exchange.complete:
                    self._queues.setdefault(exchange.lane, _Queue()).exchanges.append(exchange)
                    freed = exchange.waiting
            case Record():
                self._events[device, instruction.event] = None
            case WaitEvent() if (device, instruction.event) not in self._events:
                raise VerificationError(
                    f"plan of device {device}: {instruction.where}: it waits for event "
                    f"e{instruction.event} before this event is recorded{ADVICE} [PIPER-V003]"
                )
        times = self.trace.times[device]
        times.append((0, 0))  # `_begin` sets the times
        if stream.issued or not self._begin(stream, len(times) - 1, instruction):
            stream.issued.append((len(times) - 1, instruction))
        self._go_on()
        return freed

    def pass_time(self) -> bool:
        """Let time pass until the next event of an exchange in `Traffic`, and begin all instructions that can
        begin then.

        Returns:
            Whether there was such an event. If not, the simulation is over.
        """
        if self._traffic is None or (moment := self._traffic.advance()) is None:
            return False
        now, ended = moment
        for transfer in ended:
            queue = self._queues[transfer.owner.lane]
            queue.under_way = False
            assert transfer.start is not None
            self._over(queue, transfer.owner, transfer.start, now)
            self._start_next(queue)
        self._go_on()
        return True

    def _go_on(self) -> None:
        """Continue all streams in `_going_on`, until each waits again or has no issued instructions left."""
        while self._going_on:
            stream = self._going_on.popleft()
            while stream.issued and self._begin(stream, *stream.issued[0]):
                stream.issued.popleft()

    def _begin(self, stream: _Stream, position: int, instruction: Instruction) -> bool:
        """Run an instruction in virtual time, unless it waits for an exchange or event whose time is unknown.

        Returns:
            Whether it ran. If not, the stream is in a list of streams to continue later.
        """
        device, clock = stream.device, stream.clock
        match instruction:
            case WaitWork() | WaitSend() if self._started[device, instruction.node].end is None:
                self._started[device, instruction.node].held.append(stream)
                return False
            case WaitEvent() if self._events[device, instruction.event] is None:
                self._awaiting.setdefault((device, instruction.event), []).append(stream)
                return False
        if self._ready_at is not None and self._ready_at[device][position] > clock.time:
            clock.time = clock.since = self._ready_at[device][position]
        start = clock.time
        self._run(device, instruction, clock)
        self.trace.times[device][position] = (start, clock.time)
        self.trace.end = max(self.trace.end, clock.time)
        return True

    def _run(self, device: int, instruction: Instruction, clock: _Clock) -> None:
        """Advance the clock of the stream by the instruction, and record its effects on other streams."""
        match instruction:
            case WaitWork():
                exchange = self._started[device, instruction.node]
                assert exchange.end is not None
                self._hold(device, instruction, clock, (exchange.end, exchange.since), instruction.node)
            case WaitSend():
                # Nothing here needs the sent value, so this wait does not count as waiting for communication.
                end = self._started[device, instruction.node].end
                assert end is not None
                self._hold(device, instruction, clock, (end, end), instruction.node)
            case SendInstruction() | Irecv() | Collective():
                self._arrive(clock, self._started[device, instruction.node])
            case Record():
                key = (device, instruction.event)
                self._events[key] = ((clock.time, clock.since), instruction.node)
                self._going_on += self._awaiting.pop(key, ())
            case WaitEvent():
                recorded = self._events[device, instruction.event]
                assert recorded is not None
                self._hold(device, instruction, clock, *recorded)
            case _:
                self._occupy(device, instruction, clock)

    def _hold(
        self, device: int, instruction: Instruction, clock: _Clock, moment: Interval, node: int
    ) -> None:
        """Hold a stream until the time in `moment`: (time, since). If the stream waits, record its wait for
        `node`."""
        before = clock.time
        clock.hold(*moment)
        if clock.time > before:
            since = min(max(before, clock.since), clock.time)
            about = (device, instruction.stream, before, since, clock.time)
            self.trace.held.append(StreamWait(*about, node, self._dag.nodes[node].origin))

    def _occupy(self, device: int, instruction: Instruction, clock: _Clock) -> None:
        """Let an instruction occupy its stream for its duration. Record a span, unless the instruction takes
        no time and is not a chunk."""
        copying = self._network.host.time(instruction.nbytes) if isinstance(instruction, HostCopy) else 0
        start, duration = clock.time, self._work.of(instruction, copying)
        if duration:
            clock.time = clock.since = start + duration
        if duration or isinstance(instruction, Run):
            node = self._dag.nodes[instruction.node]
            kind = node.kind if isinstance(node, Chunk) else instruction.op
            self._span(device, instruction, kind, start, clock.time)

    def _span(self, device: int, instruction: Instruction, kind: str, start: Number, end: Number) -> None:
        """Add a span of an instruction to the trace."""
        about = (instruction.node, instruction.label, kind, instruction.origin)
        self.trace.spans.append(Span(device, instruction.row, start, end, *about))

    def _exchange(self, instruction: SendInstruction | Irecv | Collective) -> _PendingExchange:
        """Return the message or collective that an instruction joins. Call this once for each instruction."""
        meeting = self._matching.of(instruction)
        if meeting not in self._exchanges:
            self._exchanges[meeting] = _PendingExchange(lane_of(instruction), parties(instruction))
        return self._exchanges[meeting]

    def _arrive(self, clock: _Clock, exchange: _PendingExchange) -> None:
        """Record that a stream has reached its instruction for an exchange. Start the exchange if it can
        start now."""
        exchange.arrived += 1
        exchange.ready = max(exchange.ready, clock.time)
        exchange.since = max(exchange.since, clock.since)
        if exchange.complete:
            self._start_next(self._queues[exchange.lane])

    def _start_next(self, queue: _Queue) -> None:
        """Start the exchanges of a channel or group in order, until the streams of one have not all arrived
        or `Traffic` carries one."""
        while queue.exchanges and not queue.under_way:
            exchange = queue.exchanges[0]
            if exchange.arrived < exchange.parties:
                return
            start = max(exchange.ready, queue.free)
            transfer = self._transfer(exchange)
            if transfer is None:
                self._over(queue, exchange, start, start + self._duration(exchange))
            else:
                assert self._traffic is not None
                queue.under_way = True
                self._traffic.request(start, transfer)

    def _over(self, queue: _Queue, exchange: _PendingExchange, start: Number, end: Number) -> None:
        """Remove the first exchange of a queue, whose start and end are now known. Record its spans, and let
        streams that waited for its end continue."""
        queue.exchanges.popleft()
        queue.free = exchange.end = end
        for member, joined in exchange.joined:
            self._span(member, joined, "recv" if isinstance(joined, Irecv) else joined.op, start, end)
        self._going_on += exchange.held

    def _transfer(self, exchange: _PendingExchange) -> Transfer | None:
        """Return the exchange as a transfer that may delay other transfers. None if it uses neither a shared
        link nor a named communicator."""
        if self._traffic is None:
            return None
        shared = self._network.communicators
        names = tuple((device, shared[i.row]) for device, i in exchange.joined if i.row in shared)
        instruction = _carried(exchange)
        measured = self._work.measured(instruction.node)
        # An exchange with a measured duration is one phase with this latency, without bytes and routes.
        phases = self._network.phases(instruction) if measured is None else [Phase(measured, 0, None, (), 0)]
        return self._traffic.transfer(exchange, phases, names)

    def _duration(self, exchange: _PendingExchange) -> Number:
        """Return how long the exchange takes if nothing delays it."""
        instruction = _carried(exchange)
        measured = self._work.measured(instruction.node)
        if measured is not None:
            return measured
        if isinstance(instruction, Collective):
            return self._network.collective(instruction)
        return self._network.transfer(instruction.channel, sum(spec.nbytes for spec in instruction.tensors))


def _carried(exchange: _PendingExchange) -> SendInstruction | Collective:
    """Return the exchange's send or one of its collectives. These know the bytes of the exchange."""
    instruction: Any = next(joined for _, joined in exchange.joined if not isinstance(joined, Irecv))
    return instruction  # type: ignore[no-any-return]


def run_in_virtual_time(
    dag: TrainingDAG,
    plans: Mapping[int, Plan],
    work: WorkDurations,
    network: Network,
    issue: IssueCost | None = None,
) -> Trace:
    """Run the plans of all devices in virtual time.

    This takes time linear in the number of instructions, and the same plans always give the same trace.
    Exchanges that share links take more time: when one starts or ends, the rates of the exchanges that share
    links with it are computed again.

    Raises:
        VerificationError: Devices wait for each other. Or an instruction waits for an exchange or an event
            that no earlier instruction started.
    """
    # Issue each device's instructions until a device must wait for other parties of an exchange.
    world = _SimulatedDevices(dag, plans, work, network, issue)
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
        shown = "; ".join(
            f"device {d} waits in {plans[d].instructions[position[d]].where}" for d in stuck[:8]
        )
        if len(stuck) > 8:
            shown += f"; and {counted(len(stuck) - 8, 'more device')}"
        raise VerificationError(
            f"the plans deadlock: {shown}. If you changed a plan or added an operation, check its lowering. "
            "Otherwise, report this [PIPER-V004]"
        )
    while world.pass_time():
        pass
    return world.trace
