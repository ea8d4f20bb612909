"""The figures of recorded times: if the times come from the simulator, the figures equal the simulator's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_piper import schedules
from lightning_piper.compiler import Compiled, compile
from lightning_piper.plan.instructions import Irecv, SendInstruction, WaitWork
from lightning_piper.profile.files import rows_of, step_of
from lightning_piper.profile.measured_trace import Measured
from lightning_piper.profile.recorder import InstructionTimes
from lightning_piper.simulate import Link, Network, Simulation, figures, simulate
from lightning_piper.simulate.durations import WorkDurations
from lightning_piper.simulate.engine import Trace, run_in_virtual_time
from tests.simulate.programs import Chain, pipeline

# Nanoseconds for a unit of the made-up times, so long that waiting differs from finding a message that has
# arrived.
UNIT = 10**6
EPOCH = 10**12


def virtual(compiled: Compiled, durations: Any, latency: int) -> tuple[Trace, dict[int, InstructionTimes]]:
    """A simulated trace, and the times that a recorder would have read from the clock."""
    trace = run_in_virtual_time(
        compiled.dag, compiled.plans, WorkDurations(compiled.dag, durations), Network(Link(latency))
    )
    times = {}
    for device, pairs in trace.times.items():
        start, end = ([EPOCH + int(pair[k]) * UNIT for pair in pairs] for k in (0, 1))
        times[device] = InstructionTimes(start, end)
    return trace, times


def close(a: Any, b: Any) -> bool:
    return abs(float(a) * 1e-3 - float(b)) < 1e-9


def same_figures(wanted: Simulation, found: Simulation) -> bool:
    rows = [(found.devices[d], f) for d, f in wanted.devices.items()]
    times = all(close(getattr(w, k), getattr(f, k)) for f, w in rows for k in ("busy", "exposed", "bubble"))
    return times and close(wanted.step_time, found.step_time)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("latency", [0, 3])
def test_recorded_figures_are_those_of_the_simulation(schedule: str, latency: int) -> None:
    compiled = pipeline(schedule, 3, 4)
    trace, times = virtual(compiled, {"F": 10, "B": 20, "add": 1}, latency)
    wanted = figures(compiled.dag, compiled.plans, trace)
    measured = Measured(compiled.dag, compiled.plans, times, serial=False)
    found = figures(compiled.dag, compiled.plans, measured.trace)
    assert same_figures(wanted, found)
    assert any(f.exposed > 0 for f in found.devices.values()) == bool(latency)
    assert {d: f.peak_in_flight for d, f in found.devices.items()} == {
        d: f.peak_in_flight for d, f in wanted.devices.items()
    }


def test_a_clock_that_is_late_shows() -> None:
    compiled = pipeline("gpipe", 3, 4)
    trace, times = virtual(compiled, {"F": 10, "B": 20}, 3)
    late = {
        **times,
        2: InstructionTimes([t + 5 * UNIT for t in times[2].start], [t + 5 * UNIT for t in times[2].end]),
    }
    found = figures(
        compiled.dag, compiled.plans, Measured(compiled.dag, compiled.plans, late, serial=False).trace
    )
    assert not same_figures(figures(compiled.dag, compiled.plans, trace), found)


def test_durations_lead_back_to_the_step_time() -> None:
    compiled = pipeline("one_f_one_b", 3, 4)
    trace, times = virtual(compiled, {"F": 10, "B": 20, "F[PP=1]": 17, "add": 1}, 3)
    table = Measured(compiled.dag, compiled.plans, times, serial=False).durations()
    assert close(trace.end, simulate(compiled.dag, compiled.plans, table).step_time)
    first = next(key for key in table if key.startswith("%"))
    slower = simulate(compiled.dag, compiled.plans, {**table, first: table[first] * 2})
    assert not close(trace.end, slower.step_time)


def test_shares_of_the_directives_add_up() -> None:
    compiled = compile(Chain(2), torch.zeros(4, 4), schedules.one_f_one_b(2, 2))
    result = simulate(compiled.dag, compiled.plans, {"F": 1, "B": 2}, Network(Link(1)))
    whole = result.step_time * len(result.devices)
    assert sum(sum(shares) for shares in result.directives.values()) == whole
    assert result.directives[2].busy == 12  # the split made the chunks
    # What is waited for was made by `place`: 1 between the forward passes, and so on; nothing else is
    # exposed.
    assert {i for i, shares in result.directives.items() if shares.exposed} == {1}
    assert result.directives[1].exposed == sum(f.exposed for f in result.devices.values()) > 0


def test_boxes_are_the_spans_and_the_waiting() -> None:
    compiled = pipeline("one_f_one_b", 2, 2)
    trace, _ = virtual(compiled, {"F": 10, "B": 20}, 3)
    content = step_of(compiled.plans, figures(compiled.dag, compiled.plans, trace), trace)
    rows = rows_of(compiled.plans)
    kinds = [kind for *_, kind in content["boxes"]]
    assert kinds.count("F") == kinds.count("B") == 4 and kinds.count("send") == kinds.count("recv") == 4
    assert rows[0] == (0, "compute") and {row for row, *_ in content["boxes"]} <= set(range(len(rows)))
    exposed = sum(
        end - start
        for row, start, end, _, kind in content["boxes"]
        if kind == "wait" and rows[row] == (0, "compute")
    )
    assert exposed == pytest.approx(content["devices"]["0"]["exposed"])


@pytest.mark.parametrize("serial", [False, True])
def test_a_step_in_which_nothing_ran_takes_no_time(serial: bool) -> None:
    compiled = pipeline("gpipe", 3, 4)
    _, times = virtual(compiled, {"F": 10, "B": 20}, 3)
    none = {device: InstructionTimes([0] * len(t.start), [0] * len(t.end)) for device, t in times.items()}
    measured = Measured(compiled.dag, compiled.plans, none, serial)
    found = figures(compiled.dag, compiled.plans, measured.trace)
    assert found.step_time == 0 and not any(f.busy or f.exposed for f in found.devices.values())
    assert not any(measured.durations().values())
    assert step_of(compiled.plans, found, measured.trace)["step_time"] == 0 and str(found)
    one = {**none, 0: times[0]}  # the negative control: the instructions of one device ran
    measured = Measured(compiled.dag, compiled.plans, one, serial)
    assert figures(compiled.dag, compiled.plans, measured.trace).step_time > 0
    assert any(measured.durations().values())


def test_a_message_that_was_skipped_does_not_hide_later_work() -> None:
    compiled = pipeline("gpipe", 2, 2)
    _, times = virtual(compiled, {"F": 10, "B": 20}, 3)
    whole = Measured(compiled.dag, compiled.plans, times, serial=False)
    sends = [i for i in compiled.plans[0].instructions if isinstance(i, SendInstruction)]
    receives = [
        i for i in compiled.plans[1].instructions if isinstance(i, Irecv) and i.channel == sends[-1].channel
    ]
    skipped = {sends[-1].node, receives[-1].node}
    some = {}
    for device, t in times.items():
        skips = [
            isinstance(i, SendInstruction | Irecv | WaitWork) and i.node in skipped
            for i in compiled.plans[device].instructions
        ]
        some[device] = InstructionTimes(
            *(
                [0 if skip else x for skip, x in zip(skips, column, strict=True)]
                for column in (t.start, t.end)
            )
        )
    part = Measured(compiled.dag, compiled.plans, some, serial=False)
    assert [s for s in part.trace.spans if s.kind in "FB"] == [s for s in whole.trace.spans if s.kind in "FB"]
    assert part.durations().keys() == whole.durations().keys() - {f"%{sends[-1].node}"}
