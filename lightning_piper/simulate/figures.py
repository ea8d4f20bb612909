"""`simulate`: plans -> the figures of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.instructions import Run
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import DEFAULT, Durations, Number, Work
from lightning_piper.simulate.engine import Interval, Span, Trace, run_in_virtual_time
from lightning_piper.simulate.memory import Curve, curves
from lightning_piper.simulate.network import Network


@dataclass(frozen=True)
class DeviceFigures:
    """One device; times are in the unit of the durations.

    Attributes:
        busy: time in which it computes, on any of its compute streams. A compute stream is one that chunks run on.
        idle: the rest of the step: bubble and exposed communication.
        exposed: time in which it does not compute and a compute stream waits for communication only: all that it waits for has
            been computed, here or elsewhere.
        bubble: the other idle time.
        peak_bytes: largest total of the step's values (see `memory`); parameters and optimizer states come on top.
        peak_in_flight: largest number of microbatches whose activations are kept for their backward pass.
        streams: stream -> (busy, idle). A stream of communication is busy while a transfer or collective runs.
        memory: (time, bytes of the step's values from then on).
        in_flight: (time, microbatches from then on).
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


@dataclass(frozen=True)
class Simulation:
    """One step in virtual time; `print` shows a table.

    Attributes:
        step_time: until the last device is done, in the unit of the durations.
        devices: figures by device.
        timeline: what every stream did, by start, device and stream.
    """

    step_time: Number
    devices: Mapping[int, DeviceFigures]
    timeline: tuple[Span, ...]

    @property
    def bubble_fraction(self) -> Number:
        """Share of the devices' time that is bubble."""
        return self._share(sum(figures.bubble for figures in self.devices.values()))

    @property
    def exposed_fraction(self) -> Number:
        """Share of the devices' time that is exposed communication."""
        return self._share(sum(figures.exposed for figures in self.devices.values()))

    def _share(self, time: Number) -> Number:
        whole = self.step_time * len(self.devices)
        if not whole:
            return 0
        return Fraction(time, whole) if isinstance(time, int) and isinstance(whole, int) else time / whole

    def to_json(self) -> dict[str, Any]:
        """All of it in JSON's types. Fractions become floats where they are not whole."""
        names = ("busy", "idle", "exposed", "bubble", "peak_bytes", "peak_in_flight")
        devices = {}
        for device, f in self.devices.items():
            figures = {name: plain(getattr(f, name)) for name in names}
            streams = {name: {"busy": plain(busy), "idle": plain(idle)} for name, (busy, idle) in f.streams.items()}
            over_time = {"memory": [[plain(t), n] for t, n in f.memory], "in_flight": [[plain(t), n] for t, n in f.in_flight]}
            devices[str(device)] = {**figures, "streams": streams, **over_time}
        spans = [{**span._asdict(), "start": plain(span.start), "end": plain(span.end)} for span in self.timeline]
        shares = {"bubble_fraction": plain(self.bubble_fraction), "exposed_fraction": plain(self.exposed_fraction)}
        return {"step_time": plain(self.step_time), **shares, "devices": devices, "timeline": spans}

    def __str__(self) -> str:
        head = (f"step time {shown(self.step_time)}, bubble {float(self.bubble_fraction):.1%}, "
                f"exposed communication {float(self.exposed_fraction):.1%}")  # fmt: skip
        rows = [("device", "busy", "idle", "bubble", "exposed", "in flight", "peak bytes")]
        for device, f in self.devices.items():
            times = (shown(time) for time in (f.busy, f.idle, f.bubble, f.exposed))
            rows.append((str(device), *times, str(f.peak_in_flight), str(f.peak_bytes)))  # type: ignore[arg-type]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join([head, *("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)])


def simulate(
    dag: TrainingDAG, plans: Mapping[int, Plan], durations: Durations = DEFAULT, network: Network | None = None
) -> Simulation:
    """Execute the plans of a DAG in virtual time. About n log n in the number of instructions, deterministic, without tensors.

    Args:
        dag: the finished DAG that the plans were compiled from.
        plans: of all its devices.
        durations: of chunks, and of any other work; see `durations.Work`. By default F takes 1, B 2, BI and BW 1.
        network: of transfers and collectives that have no duration of their own; by default they take no time.

    Numbers may be int, float or Fraction; without floats all figures are exact.

    Raises:
        SimulationError: durations that cannot be used.
        VerificationError: the plans deadlock.
    """
    issued = [i.node for plan in plans.values() for i in plan.instructions if isinstance(i, Run)]
    trace = run_in_virtual_time(dag, plans, Work(dag, durations, issued), network or Network())
    worked: dict[int, dict[str, list[Interval]]] = {device: {s: [] for s in plan.streams} for device, plan in plans.items()}
    for span in trace.spans:
        worked[span.device][span.stream].append((span.start, span.end))
    held: dict[int, list[tuple[str, Interval]]] = {device: [] for device in plans}
    for device, stream, interval in trace.held:
        held[device].append((stream, interval))
    devices = {d: _figures(dag, plan, trace, worked[d], held[d]) for d, plan in sorted(plans.items())}
    timeline = sorted(trace.spans, key=lambda span: (span.start, span.device, span.stream, span.end))
    return Simulation(trace.end, devices, tuple(timeline))


def _figures(
    dag: TrainingDAG, plan: Plan, trace: Trace, worked: Mapping[str, list[Interval]], held: Iterable[tuple[str, Interval]]
) -> DeviceFigures:
    computing = {instruction.stream for instruction in plan.instructions if isinstance(instruction, Run)}
    work = [interval for stream in computing for interval in worked[stream]]
    waits = [interval for stream, interval in held if stream in computing]
    busy = _length(work)
    exposed = _length(work + waits) - busy
    streams = {stream: _length(spans) for stream, spans in worked.items()}
    memory, in_flight = curves(dag, plan, trace)
    return DeviceFigures(
        busy, trace.end - busy, exposed, trace.end - busy - exposed, max(n for _, n in memory), max(n for _, n in in_flight),
        {stream: (time, trace.end - time) for stream, time in streams.items()}, memory, in_flight,
    )  # fmt: skip


def _length(intervals: Iterable[Interval]) -> Number:
    """Time that at least one of the intervals covers."""
    total: Number = 0
    covered: Number = 0
    for start, end in sorted(intervals):
        if end > covered:
            total += end - max(start, covered)
            covered = end
    return total


def plain(value: Number) -> int | float:
    """A number as JSON knows it."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def shown(value: Number) -> str:
    return f"{float(value):.6g}"
