"""`simulate` computes the figures of a step from plans. `figures` computes them from any trace, simulated or
recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from lightning_piper.common import limits
from lightning_piper.common.units import counted
from lightning_piper.errors import SimulationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.instructions import Run
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import DEFAULT, Durations, Number, WorkDurations
from lightning_piper.simulate.engine import Interval, Span, StreamWait, Trace, run_in_virtual_time
from lightning_piper.simulate.issue_cost import IssueCost
from lightning_piper.simulate.memory import Curve, curves
from lightning_piper.simulate.network import Network


class Shares(NamedTuple):
    """Busy, exposed and bubble time, in the unit of the durations. They belong to one device, or to one
    directive on one device or on all devices."""

    busy: Number
    exposed: Number
    bubble: Number


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of one device. Times are in the unit of the durations.

    Attributes:
        busy: The time in which the device computes, on any of its compute streams. A compute stream is a
            stream with chunks.
        idle: The other time of the step: bubble and exposed communication.
        exposed: The time in which the device does not compute and a compute stream waits for communication
            only: the values for which it waits have been computed.
        bubble: The idle time that is not exposed communication.
        peak_bytes: The maximum of `memory`. It does not include parameters and optimizer states.
        peak_in_flight: The maximum number of microbatches whose activations are saved for their backward
            pass.
        streams: Stream, or communicator of collectives -> (busy, idle). A communication stream is busy while
            a transfer or collective runs.
        memory: (time, bytes of the step's values in the device's memory from this time on).
        in_flight: (time, number of microbatches with saved activations from this time on).
        memory_by_kind: The curve for each of `memory.KINDS`. Only `host` counts bytes in the host's memory.
        directives: Index of a directive -> the times that belong to it. Work belongs to the directive that
            made its node, and waiting to the directive that made the awaited node. The key None has the times
            of nodes that the capture made, and the time in which the device waits for nothing.
    """

    busy: Number
    idle: Number
    exposed: Number
    bubble: Number
    peak_bytes: int
    peak_in_flight: int
    streams: Mapping[str, tuple[Number, Number]]
    memory: Curve
    in_flight: Curve
    memory_by_kind: Mapping[str, Curve]
    directives: Mapping[int | None, Shares]


@dataclass(frozen=True, repr=False)
class Simulation:
    """One step in virtual time. `print` shows a table.

    Attributes:
        step_time: The end of the last device, in the unit of the durations.
        devices: Figures by device.
        timeline: The spans of all streams, sorted by start, device and stream.
    """

    step_time: Number
    devices: Mapping[int, DeviceFigures]
    timeline: tuple[Span, ...]

    def __repr__(self) -> str:
        return (
            f"<Simulation of {counted(len(self.devices), 'device')}: the step takes {shown(self.step_time)}>"
        )

    @property
    def bubble_fraction(self) -> Number:
        """The share of the devices' time that is bubble."""
        return self._share(sum(figures.bubble for figures in self.devices.values()))

    @property
    def exposed_fraction(self) -> Number:
        """The share of the devices' time that is exposed communication."""
        return self._share(sum(figures.exposed for figures in self.devices.values()))

    @property
    def directives(self) -> dict[int | None, Shares]:
        """The sums of `DeviceFigures.directives` over the devices."""
        total: dict[int | None, Shares] = {}
        for figures in self.devices.values():
            for directive, shares in figures.directives.items():
                before = total.get(directive, Shares(0, 0, 0))
                total[directive] = Shares(*(a + b for a, b in zip(before, shares, strict=True)))
        return dict(sorted(total.items(), key=lambda item: -1 if item[0] is None else item[0]))

    def _share(self, time: Number) -> Number:
        whole = self.step_time * len(self.devices)
        if not whole:
            return 0
        return Fraction(time, whole) if isinstance(time, int) and isinstance(whole, int) else time / whole

    def to_json(self) -> dict[str, Any]:
        """Return the simulation as JSON data. A fraction becomes an integer if it is one, otherwise a
        float."""
        names = ("busy", "idle", "exposed", "bubble", "peak_bytes", "peak_in_flight")
        devices = {}
        for device, f in self.devices.items():
            figures = {name: plain(getattr(f, name)) for name in names}
            streams = {
                name: {"busy": plain(busy), "idle": plain(idle)} for name, (busy, idle) in f.streams.items()
            }
            over_time: dict[str, Any] = {"memory": _points(f.memory), "in_flight": _points(f.in_flight)}
            over_time["memory_by_kind"] = {kind: _points(curve) for kind, curve in f.memory_by_kind.items()}
            devices[str(device)] = {
                **figures,
                "streams": streams,
                **over_time,
                "directives": _rows(f.directives),
            }
        spans = [
            {**span._asdict(), "start": plain(span.start), "end": plain(span.end)} for span in self.timeline
        ]
        shares = {
            "bubble_fraction": plain(self.bubble_fraction),
            "exposed_fraction": plain(self.exposed_fraction),
        }
        return {
            "step_time": plain(self.step_time),
            **shares,
            "directives": _rows(self.directives),
            "devices": devices,
            "timeline": spans,
        }

    def __str__(self) -> str:
        """Return the figures of the step, and a table with one row for each device."""
        head = (
            f"step time {shown(self.step_time)}, bubble {float(self.bubble_fraction):.1%}, "
            f"exposed communication {float(self.exposed_fraction):.1%}"
        )
        rows = [("device", "busy", "idle", "bubble", "exposed", "in flight", "peak bytes")]
        for device, f in self.devices.items():
            times = (shown(time) for time in (f.busy, f.idle, f.bubble, f.exposed))
            rows.append((str(device), *times, str(f.peak_in_flight), str(f.peak_bytes)))  # type: ignore[arg-type]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join(
            [head, *("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)]
        )


def simulate(
    dag: TrainingDAG,
    plans: Mapping[int, Plan],
    durations: Durations = DEFAULT,
    network: Network | None = None,
    issue: IssueCost | None = None,
) -> Simulation:
    """Run the plans of a DAG in virtual time.

    The simulation is deterministic, uses no tensors, and takes about n log n steps for n instructions.
    Numbers may be int, float or Fraction. Without floats, all figures are exact.

    Args:
        dag: The finished DAG from which the plans were compiled.
        plans: The plans of all devices of the DAG.
        durations: The durations of chunks and other work; see `durations.WorkDurations` (default: F takes 1,
            B 2, BI and BW 1).
        network: The links for transfers and collectives without a duration of their own (default: they take
            no time).
        issue: The time that hosts need to issue instructions (default: no time).

    Raises:
        SimulationError: The durations are invalid, or an argument has the wrong type.
        VerificationError: The plans deadlock, or an instruction waits for an exchange or an event that no
            earlier instruction started.
    """
    planned = isinstance(plans, Mapping) and all(isinstance(plan, Plan) for plan in plans.values())
    checks = (
        ("dag", dag, isinstance(dag, TrainingDAG), "a TrainingDAG"),
        ("plans", plans, planned, "a mapping from devices to plans"),
    )
    for name, given, good, kind in checks:
        if not good:
            raise SimulationError(
                f"simulate({name}=...) is {limits.kind_of(given)}, not {kind}. Give compiled.{name}, where compiled is "
                "the result of piper.compile [PIPER-T003]"
            )
    if network is not None and not isinstance(network, Network):
        raise SimulationError(
            f"simulate(network={limits.shown(network)}) is not usable. Give a Network [PIPER-T003]"
        )
    if issue is not None and not isinstance(issue, IssueCost):
        raise SimulationError(
            f"simulate(issue={limits.shown(issue)}) is not usable. Give an IssueCost [PIPER-T003]"
        )
    chunks = [i.node for plan in plans.values() for i in plan.instructions if isinstance(i, Run)]
    work = WorkDurations(dag, durations, chunks)
    return figures(dag, plans, run_in_virtual_time(dag, plans, work, network or Network(), issue))


def figures(dag: TrainingDAG, plans: Mapping[int, Plan], trace: Trace) -> Simulation:
    """Return the figures of a simulated or recorded step.

    Args:
        dag: The finished DAG.
        plans: The plans of all devices of the DAG.
        trace: The trace of the step. Its times count from the start of the step.
    """
    worked: dict[int, list[Span]] = {device: [] for device in plans}
    for span in trace.spans:
        worked[span.device].append(span)
    held: dict[int, list[StreamWait]] = {device: [] for device in plans}
    for wait in trace.held:
        held[wait.device].append(wait)
    devices = {d: _figures(dag, plan, trace, worked[d], held[d]) for d, plan in sorted(plans.items())}
    timeline = sorted(trace.spans, key=lambda span: (span.start, span.device, span.stream, span.end))
    return Simulation(trace.end, devices, tuple(timeline))


def _figures(
    dag: TrainingDAG, plan: Plan, trace: Trace, spans: list[Span], held: list[StreamWait]
) -> DeviceFigures:
    """Return the figures of one device from its spans and from the waits of its streams."""
    computing = {instruction.stream for instruction in plan.instructions if isinstance(instruction, Run)}
    parts = [_Part(span.start, span.end, _WORK, span.origin) for span in spans if span.stream in computing]
    for wait in held:
        if wait.stream in computing:
            parts.append(_Part(wait.start, wait.since, _WAIT, wait.origin))
            parts.append(_Part(wait.since, wait.end, _EXPOSED, wait.origin))
    directives = _shares(parts, trace.end)
    busy, exposed, bubble = (sum(column) for column in zip(*directives.values(), strict=True))
    by_stream: dict[str, list[Interval]] = {row: [] for row in plan.rows}
    for span in spans:
        by_stream[span.stream].append((span.start, span.end))
    lengths = {stream: _length(intervals) for stream, intervals in by_stream.items()}
    memory, by_kind, in_flight = curves(dag, plan, trace)
    return DeviceFigures(
        busy,
        trace.end - busy,
        exposed,
        bubble,
        max(n for _, n in memory),
        max(n for _, n in in_flight),
        {stream: (time, trace.end - time) for stream, time in lengths.items()},
        memory,
        in_flight,
        by_kind,
        directives,
    )


# The states of a device: its compute streams work, wait for communication only, wait for other things, or do
# neither. If several apply at once, the first one counts. The bubble is _WAIT and _NOTHING.
_WORK, _EXPOSED, _WAIT, _NOTHING = range(4)


class _Part(NamedTuple):
    """A time in which one compute stream of a device is in one state.

    Attributes:
        what: The state: `_WORK`, `_EXPOSED` or `_WAIT`.
        directive: The index of the directive to which the time belongs. None is the capture.
    """

    start: Number
    end: Number
    what: int
    directive: int | None


def _shares(parts: Iterable[_Part], step: Number) -> dict[int | None, Shares]:
    """Divide the step's time among directives and states of a device. Every moment counts once: for the first
    state that applies, and for the directive whose part in this state began first.

    Args:
        parts: The parts of the device's compute streams.
        step: The end of the step.
    """
    # Time -> (1 if a part begins or -1 if it ends, the part).
    changes: dict[Number, list[tuple[int, _Part]]] = {0: [], step: []}
    for part in parts:
        if part.end > part.start:
            changes.setdefault(part.start, []).append((1, part))
            changes.setdefault(part.end, []).append((-1, part))
    found: dict[int | None, list[Number]] = {None: [0, 0, 0]}
    # For each state, directive -> number of parts that have begun and not ended.
    open_parts: tuple[Counter[int | None], ...] = (Counter(), Counter(), Counter())
    before: Number = 0
    for moment in sorted(changes):
        if before < moment <= step:
            what = next((w for w in (_WORK, _EXPOSED, _WAIT) if open_parts[w]), _NOTHING)
            directive = None if what == _NOTHING else next(iter(open_parts[what]))
            found.setdefault(directive, [0, 0, 0])[min(what, _WAIT)] += moment - before
        before = moment
        for sign, part in changes[moment]:
            count = open_parts[part.what]
            count[part.directive] += sign
            if not count[part.directive]:
                del count[part.directive]
    return {directive: Shares(*times) for directive, times in found.items()}


def _length(intervals: Iterable[Interval]) -> Number:
    """Return the time that at least one of the intervals covers."""
    total: Number = 0
    covered: Number = 0
    for start, end in sorted(intervals):
        if end > covered:
            total += end - max(start, covered)
            covered = end
    return total


def _points(curve: Curve) -> list[list[int | float]]:
    return [[plain(t), n] for t, n in curve]


def _rows(directives: Mapping[int | None, Shares]) -> list[dict[str, Any]]:
    return [{"directive": i, **{k: plain(v) for k, v in s._asdict().items()}} for i, s in directives.items()]


def plain(value: Number) -> int | float:
    """Return a number as JSON data: a fraction as an integer if it is one, otherwise as a float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def shown(value: Number) -> str:
    return f"{float(value):.6g}"
