"""Durations and counts in fitting units."""

from __future__ import annotations

import pytest

from lightning_piper.common.units import compact, duration
from lightning_piper.summary import LONG, told_of_capture


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 ms"),
        (0.000_012_34, "0.0123 ms"),
        (0.012_34, "12.3 ms"),
        (0.999_4, "999 ms"),
        (0.999_6, "1 s"),
        (12.34, "12.3 s"),
        (119.4, "119 s"),
        (119.6, "2.0 min"),
        (5400, "90.0 min"),
    ],
)
def test_a_duration_has_a_fitting_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("seconds, text", [(0.012_345_6, "12.35 ms"), (4.0981, "4.098 s"), (600, "10.0 min")])
def test_a_duration_may_have_more_digits(seconds: float, text: str) -> None:
    assert duration(seconds, 4) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0"),
        (999, "999"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_600, "1M"),
        (1_236_000_000, "1.24B"),
        (2 * 10**15, "2e+03T"),
    ],
)
def test_a_large_count_has_three_digits(count: int, text: str) -> None:
    assert compact(count) == text


def test_only_a_long_capture_is_told() -> None:
    assert told_of_capture("training_step", LONG) is None
    assert told_of_capture("training_step", 65) == "PiperStrategy captured training_step in 65 s"
