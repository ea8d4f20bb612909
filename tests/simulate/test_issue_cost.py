"""The time that hosts need to issue instructions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from lightning_piper.errors import SimulationError
from lightning_piper.simulate import IssueCost, Number, Simulation, simulate
from tests.simulate.programs import pipeline


def run(issue: IssueCost | None = None) -> Simulation:
    program = pipeline("gpipe", 2, 2)
    return simulate(program.dag, program.plans, {"F": 1, "B": 2}, issue=issue)


def issued(device: int) -> list[str]:
    return [instruction.op for instruction in pipeline("gpipe", 2, 2).plans[device].instructions]


def starts(result: Simulation, device: int) -> list[Number]:
    return [span.start for span in result.timeline if span.device == device and span.kind in "FB"]


def positions(device: int) -> list[int]:
    """The numbers of instructions up to and including each chunk."""
    return [i + 1 for i, each in enumerate(issued(device)) if each == "run"]


def test_a_step_that_waits_for_its_hosts() -> None:
    """If issuing takes much longer than the work, no chunk starts before its instruction has been issued, and
    the first chunks start then.
    """
    result = run(IssueCost(100))
    for device in (0, 1):
        at = [100 * position for position in positions(device)]
        assert all(start >= issue for start, issue in zip(starts(result, device), at, strict=True))
        assert result.devices[device].busy == 6
    assert starts(result, 0)[:2] == [100 * position for position in positions(0)[:2]]
    assert result.step_time >= 100 * max(len(issued(0)), len(issued(1)))


def test_one_thread_for_two_devices() -> None:
    """It issues one instruction of each device in turn, until one of the plans ends."""
    plans = pipeline("gpipe", 2, 2).plans
    lengths = [len(issued(device)) for device in (0, 1)]
    for device, times in IssueCost(100, devices=2).times(plans).items():
        other = lengths[1 - device]
        assert times == [100 * (k + min(k - (device == 0), other)) for k in range(1, lengths[device] + 1)]
    assert starts(run(IssueCost(100, devices=2)), 0)[:2] == [
        100 * (2 * position - 1) for position in positions(0)[:2]
    ]
    assert run(IssueCost(100, devices=1)) == run(IssueCost(100)) != run(IssueCost(100, devices=2))


def test_operations_with_times_of_their_own() -> None:
    """A cost that the work hides changes nothing. Chunks alone: the first one of stage 0 starts at 1/8."""
    assert run(IssueCost({"free": 5})) == run(IssueCost(0)) == run()
    eighth = Fraction(1, 8)
    assert starts(run(IssueCost({"run": eighth})), 0)[:2] == [eighth, 1 + eighth]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IssueCost(-1), "IssueCost: the time is -1. Give 0, or a number"),
        (lambda: IssueCost({"run": "fast"}), "IssueCost: the time of 'run' is 'fast'"),
        (
            lambda: IssueCost(1, devices=0),
            r"IssueCost\(devices=0\) is not usable. Give the number of devices",
        ),
        (lambda: run(5), r"simulate\(issue=5\) is not usable. Give an IssueCost"),  # type: ignore[arg-type]
    ],
)
def test_costs_that_cannot_be(build: Any, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        build()
