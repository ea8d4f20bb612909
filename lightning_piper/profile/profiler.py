"""`PiperProfiler`: the recording as a Lightning profiler."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.profilers import Profiler

from lightning_piper.common.units import counted
from lightning_piper.profile.clock import Processes
from lightning_piper.profile.recording import Recording
from lightning_piper.profile.schedule import Schedule, schedule_of


class PiperProfiler(Profiler):
    """A profiler that records the steps of a `PiperStrategy`.

    `Trainer(strategy=PiperStrategy(...), profiler=PiperProfiler(active=5))` records the same as
    `PiperStrategy(profile=Schedule(...))`. In addition, the Trainer prints the figures of the last recorded
    step at the end.

    Args:
        wait, warmup, active, repeat, kernels: See `Schedule`.
        dirpath, filename: A file for the printed figures instead of the log, as for Lightning's profilers.

    Raises:
        PiperError: A number is invalid.
    """

    def __init__(
        self,
        wait: int = 5,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        kernels: bool = False,
        dirpath: str | Path | None = None,
        filename: str | None = None,
    ) -> None:
        super().__init__(dirpath, filename)
        self.schedule = Schedule(wait, warmup, active, repeat, kernels)
        self.recording: Recording | None = None

    def start(self, action_name: str) -> None:
        """Do nothing: the Trainer's own actions are not recorded."""

    def stop(self, action_name: str) -> None:
        """Do nothing: the Trainer's own actions are not recorded."""

    def summary(self) -> str:
        """Return the figures of the last recorded step as text. Empty if no step was written, and on all
        ranks but 0."""
        if self.recording is None or self.recording.last is None:
            return ""
        steps = f"recorded {counted(len(self.recording.written), 'step')} in {self.recording.folder}"
        return f"{steps}. The last step, in seconds:\n{self.recording.last}"


def _profiler_of(trainer: pl.Trainer) -> PiperProfiler | None:
    """Return the Trainer's profiler if it is a `PiperProfiler`, otherwise None."""
    profiler = getattr(trainer, "profiler", None)
    return profiler if isinstance(profiler, PiperProfiler) else None


def requested_by(profile: Schedule | bool | None, trainer: pl.Trainer) -> str | None:
    """Return the code by which a user requests a recording: "PiperStrategy(profile=...)" or "PiperProfiler".
    Return None if the user does not request one.

    Args:
        profile: The argument of the strategy.
        trainer: The trainer.

    Raises:
        PiperError: `profile` is not a schedule.
    """
    if schedule_of(profile) is not None:
        return "PiperStrategy(profile=...)"
    return None if _profiler_of(trainer) is None else "PiperProfiler"


def recording_of(
    profile: Schedule | bool | None, trainer: pl.Trainer, world: Processes, verification: str | None
) -> Recording | None:
    """Return the recording that `PiperStrategy(profile=...)` or `Trainer(profiler=...)` requests, or None.
    Collective.

    If both request one, the strategy's schedule counts.

    Args:
        profile: The argument of the strategy.
        trainer: The trainer.
        world: The processes.
        verification: The report of a verification by execution, on rank 0.

    Raises:
        PiperError: `profile` is not a schedule.
    """
    given, own = schedule_of(profile), _profiler_of(trainer)
    schedule = own.schedule if given is None and own is not None else given
    if schedule is None:
        return None
    recording = Recording(schedule, trainer, world, verification)
    if own is not None:
        own.recording = recording
    return recording
