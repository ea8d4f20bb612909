"""Convert recorded times to a trace like the simulator's, so that the same functions compute the figures of
both.

On a CPU, one thread computes, starts messages and waits, so starting and waiting delay the device. A message
lasts from its start until its receiver's wait returns, because its actual arrival is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan.instructions import (
    Collective,
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
from lightning_piper.profile.recorder import InstructionTimes
from lightning_piper.simulate.engine import Interval, Lane, Span, StreamWait, Trace, lane_of

SECOND = 1e-9  # factor from nanoseconds, the unit of recorded times, to seconds
AT_ONCE = 50e-6  # seconds; if a wait is shorter, its message had arrived before the wait began


@dataclass
class _RecordedExchange:
    """A message or a collective.

    Attributes:
        parties: The number of its parties.
        joined: (device, instruction, start, end) of each party that has joined. All times are in seconds.
        since: From this time on, only communication delayed the last party that joined.
        done: Device -> end of its wait for the exchange.
    """

    parties: int
    joined: list[tuple[int, Instruction, float, float]] = field(default_factory=list)
    since: float = 0.0
    done: dict[int, float] = field(default_factory=dict)


class Measured:
    """The measured trace of one step. The constructor reads the devices' times in an order that respects
    causality, even if clocks disagree.

    Args:
        dag: The finished DAG.
        plans: The plans of all its devices.
        times: The recorded times by device, on one clock.
        serial: Whether the instructions of a device run one after the other (CPU), not on several streams
            (CUDA).

    Attributes:
        zero: The earliest recorded time, in nanoseconds; 0 if no instruction ran. The trace counts from it.
        trace: The measured trace, in seconds.
        started: (device, node) -> the exchange that the device's instruction of this node has joined.
    """

    def __init__(
        self, dag: TrainingDAG, plans: Mapping[int, Plan], times: Mapping[int, InstructionTimes], serial: bool
    ) -> None:
        self._dag, self._plans, self._serial = dag, plans, serial
        self.zero = min((s for t in times.values() for s in t.start if s), default=0)
        self.trace = Trace(times={device: self._seconds(times[device]) for device in plans})
        self._ran = {device: [bool(s) for s in times[device].start] for device in plans}
        self._computing = {
            device: next((i.stream for i in plan.instructions if isinstance(i, Run)), "compute")
            for device, plan in plans.items()
        }
        # (device, stream; "" if serial) -> the time from which only communication has delayed the stream
        self._since: dict[tuple[int, str], float] = {}
        # (device, event) -> (`_since` of the stream that recorded the event, node that recorded it)
        self._events: dict[tuple[int, int], tuple[float, int]] = {}
        self._matching = Matching()
        self._exchanges: dict[Meeting, _RecordedExchange] = {}
        self.started: dict[tuple[int, int], _RecordedExchange] = {}
        self._follow()

    def _seconds(self, times: InstructionTimes) -> list[Interval]:
        """Return start and end of each instruction in seconds after `zero`. Start and end are equal if the
        instruction did not run."""
        found: list[Interval] = []
        before = 0.0
        for start, end in zip(times.start, times.end, strict=True):
            pair = ((start - self.zero) * SECOND, (end - self.zero) * SECOND) if start else (before, before)
            before = max(pair)
            found.append((max(pair[0], 0.0), before))
        return found

    def _follow(self) -> None:
        """Read all instructions, and then add the spans of exchanges. At a wait, first read the other devices
        until all parties have joined."""
        position = dict.fromkeys(self._plans, 0)
        ready = deque(self._plans)
        while ready:
            device = ready.popleft()
            instructions = self._plans[device].instructions
            before = position[device]
            while position[device] < len(instructions):
                instruction = instructions[position[device]]
                ran = self._ran[device][position[device]]
                exchange = (
                    self.started.get((device, instruction.node))
                    if ran and isinstance(instruction, WaitWork)
                    else None
                )
                if exchange is not None and len(exchange.joined) < exchange.parties:
                    break
                if ran or isinstance(instruction, Irecv):
                    start, end = self.trace.times[device][position[device]]
                    self._read(device, instruction, float(start), float(end))
                position[device] += 1
            if position[device] > before:
                ready.extend(
                    d
                    for d in self._plans
                    if position[d] < len(self._plans[d].instructions) and d not in ready
                )
        self._close()

    def _read(self, device: int, instruction: Instruction, start: float, end: float) -> None:
        """Add one instruction to the trace: a span if it computes, otherwise the time that it waited. An
        instruction of an exchange also joins the exchange, whose spans `_close` adds."""
        clock = (device, "" if self._serial else instruction.stream)
        since = self._since.get(clock, 0.0)
        self.trace.end = max(self.trace.end, end)
        match instruction:
            case WaitWork():
                exchange = self.started[device, instruction.node]
                exchange.done[device] = end
                self._hold(device, instruction, start, max(since, exchange.since), end, instruction.node)
            case WaitSend():
                self._hold(device, instruction, start, end, end, instruction.node)
            case SendInstruction() | Irecv() | Collective():
                self._join(device, instruction, start, end, since)
                self._hold(device, instruction, start, since, end, instruction.node)
            case Record():
                self._events[device, instruction.event] = (since, instruction.node)
            case WaitEvent() if not self._serial:
                # A step that skips instructions may also skip the one that records the event.
                known, awaited = self._events.get((device, instruction.event), (since, instruction.node))
                self._hold(device, instruction, start, max(since, known), end, awaited)
            case WaitEvent():
                pass
            case _:
                node = self._dag.nodes[instruction.node]
                kind = node.kind if isinstance(node, Chunk) else instruction.op
                self._span(device, instruction, kind, start, end)
                self._since[clock] = end

    def _hold(
        self, device: int, instruction: Instruction, start: float, since: float, end: float, node: int
    ) -> None:
        """Add the time from `start` to `end`, in which a stream waited for `node`. From `since` on, only
        communication delayed the stream."""
        clock = (device, "" if self._serial else instruction.stream)
        since = min(max(since, start), end)
        self._since[clock] = max(self._since.get(clock, 0.0), since if since > start else 0.0)
        stream = self._computing[device] if self._serial else instruction.stream
        if end > start:
            self.trace.held.append(
                StreamWait(device, stream, start, since, end, node, self._dag.nodes[node].origin)
            )

    def _join(
        self,
        device: int,
        instruction: SendInstruction | Irecv | Collective,
        start: float,
        stop: float,
        since: float,
    ) -> None:
        """Add the party of one device to the exchange of an instruction."""
        exchange = self._exchanges.setdefault(
            self._matching.of(instruction), _RecordedExchange(parties(instruction))
        )
        exchange.joined.append((device, instruction, start, stop))
        exchange.since = max(exchange.since, since)
        self.started[device, instruction.node] = exchange

    def _close(self) -> None:
        """Add the spans of exchanges. An exchange ends when a wait shows that it is over."""
        for exchange in {id(e): e for e in self.started.values()}.values():
            last = max(exchange.done.values(), default=0.0)
            for device, instruction, start, _ in exchange.joined:
                end = max(exchange.done.get(device, last), start)
                self._span(
                    device,
                    instruction,
                    "recv" if isinstance(instruction, Irecv) else instruction.op,
                    start,
                    end,
                )

    def _span(self, device: int, instruction: Instruction, kind: str, start: float, end: float) -> None:
        """Add a span of an instruction to the trace. Times are in seconds after `zero`."""
        about = (instruction.node, instruction.label, kind, instruction.origin)
        self.trace.spans.append(Span(device, instruction.row, start, end, *about))

    def durations(self) -> dict[str, float]:
        """Return a table of durations for `simulate`: chunks and transfers by node, other work by operation,
        in seconds.

        A transfer that had arrived before its wait may have ended at any time before. Its duration is capped
        at the median duration of awaited transfers on its channel or in its group (0 without any). On a CPU,
        the time to start communication counts as part of the chunk before it.
        """
        chunks: dict[int, list[float]] = {}
        others: dict[str, list[float]] = {}
        for device, plan in self._plans.items():
            last: list[float] | None = None  # durations of the previous chunk
            for instruction, (start, end) in zip(plan.instructions, self.trace.times[device], strict=True):
                if isinstance(instruction, Run):
                    last = chunks.setdefault(instruction.node, [])
                    last.append(float(end - start))
                elif self._serial and last and isinstance(instruction, SendInstruction | Irecv | Collective):
                    last[-1] += float(end - start)
                elif not isinstance(
                    instruction,
                    SendInstruction | Irecv | WaitWork | WaitSend | Collective | Record | WaitEvent,
                ):
                    others.setdefault(instruction.op, []).append(float(end - start))
        table = {f"%{node}": fmean(found) for node, found in chunks.items()}
        table |= {op: fmean(found) for op, found in others.items()}
        return table | {f"%{node}": duration for node, duration in self._transfers().items()}

    def _transfers(self) -> dict[int, float]:
        """Return the duration of each transfer by node; see `durations`."""
        held = {(wait.device, wait.node): wait for wait in self.trace.held}
        waited: dict[Lane, list[float]] = {}  # durations of transfers that a device really waited for
        # (lane, node, duration, whether a device waited for the transfer, so the duration is known)
        found: list[tuple[Lane, int, float, bool]] = []
        for exchange in {id(e): e for e in self.started.values()}.values():
            first = next((i for _, i, *_ in exchange.joined if not isinstance(i, Irecv)), None)
            if first is None:  # the step skipped the send
                continue
            assert isinstance(first, SendInstruction | Collective)
            lane = lane_of(first)
            ready = max(stop for *_, stop in exchange.joined)
            duration = max(min(exchange.done.values(), default=ready) - ready, 0.0)
            receivers = [
                held.get((d, i.node)) for d, i, *_ in exchange.joined if not isinstance(i, SendInstruction)
            ]
            known = any(
                wait is not None and wait.end - max(wait.start, ready) > AT_ONCE for wait in receivers
            )
            found.append((lane, first.node, duration, known))
            if known:
                waited.setdefault(lane, []).append(duration)
        by_node: dict[int, list[float]] = {}
        for of, node, duration, sure in found:
            usual = median(waited.get(of, [0.0]))
            by_node.setdefault(node, []).append(duration if sure else min(duration, usual))
        return {node: fmean(durations) for node, durations in by_node.items()}
