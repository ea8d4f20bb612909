"""Compares the times of the first steps of a searched program with the search's prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from lightning_piper.common.units import duration

UNMEASURED = 2  # first steps, which also allocate memory and fill caches
STEPS = 20  # number of measured steps
EXCESS = 1.2  # a program is reported if its steps take more than this multiple of the prediction


class StepTimes:
    """The times of the first steps of a searched program on this process.

    A step is the forward pass, the backward pass and the optimizer's update. Its time includes the user's
    hooks and waits for other processes. So a slow step is a reason to tell the user, but not to change the
    program, because a busy machine would then change the numbers of a fit.

    Use it as a context around each step. After the last step to measure, the context does nothing.

    Args:
        predicted: The predicted seconds of a step.
        say: Tells the user.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, predicted: float, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._predicted, self._say, self._clock = predicted, say, clock
        self._start = 0.0
        self._seconds: list[float] = []

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *error: object) -> None:
        """Add the time of a step. After the last step to measure, tell the user if the median is too long."""
        if len(self._seconds) == UNMEASURED + STEPS:
            return
        self._seconds.append(self._clock() - self._start)
        if len(self._seconds) < UNMEASURED + STEPS:
            return
        median = statistics.median(self._seconds[UNMEASURED:])
        if median > EXCESS * self._predicted:
            self._say(
                f"PiperStrategy: a step of the chosen program takes {duration(median, 4)} (median of {STEPS} "
                f"steps on rank 0), which is {median / self._predicted - 1:.0%} more than the predicted "
                f"{duration(self._predicted, 4)}. The time includes hooks and waits for other processes. "
                "PiperStrategy(profile=True) shows in TensorBoard what takes the time"
            )
