"""The time of the first steps of a searched program, beside the prediction."""

from __future__ import annotations

import itertools

import pytest

from lightning_piper.session.step_times import STEPS, UNMEASURED, StepTimes


def told(predicted: float, *seconds: float) -> list[str]:
    """Return what the user reads after steps that take `seconds` each, in turns, after slow first steps."""
    durations = [100.0] * UNMEASURED + list(itertools.islice(itertools.cycle(seconds), STEPS))
    ticks = iter([*(x for duration in durations for x in (0.0, duration)), 0.0])
    said: list[str] = []
    times = StepTimes(predicted, said.append, lambda: next(ticks))
    for _ in durations:
        assert not said
        with times:
            pass
    with times:  # is not measured
        pass
    return said


def test_slow_steps_are_reported():
    (text,) = told(0.01, 0.013, 0.013, 9.0)
    for part in ("takes 13 ms", "30% more than the predicted 10 ms", "median of 20 steps on rank 0"):
        assert part in text


@pytest.mark.parametrize("seconds", [(0.005,), (0.0119,), (0.0119, 0.0119, 9.0)])
def test_others_are_not(seconds):
    assert not told(0.01, *seconds)
