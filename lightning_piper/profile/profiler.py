"""`PiperProfiler`: the recording as a Lightning profiler."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.profilers import Profiler

from lightning_piper.profile.recording import Recording
from lightning_piper.profile.schedule import Schedule, schedule_of


class PiperProfiler(Profiler):
    """Records the steps of a `PiperStrategy`: `Trainer(strategy=PiperStrategy(...), profiler=PiperProfiler(active=5))`.

    The same as `PiperStrategy(profile=Schedule(...))`; the Trainer prints the figures of the last recorded step when it is done.

    Args:
        wait, warmup, active, repeat, kernels: as of `Schedule`.
        dirpath, filename: a file for the printed figures instead of the log, as of Lightning's profilers.

    Raises:
        PiperError: a number that cannot be used.
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
        """The Trainer's own actions are not recorded."""

    def stop(self, action_name: str) -> None:
        """The Trainer's own actions are not recorded."""

    def summary(self) -> str:
        if self.recording is None or self.recording.last is None:
            return ""
        steps = f"recorded {len(self.recording.written)} steps in {self.recording.folder}"
        return f"{steps}; the last one, in seconds:\n{self.recording.last}"


def wanted(profile: object, profiler: object) -> Schedule | None:
    """What is to be recorded, by `PiperStrategy(profile=...)` or `Trainer(profiler=...)`; the strategy's comes first.

    Raises:
        PiperError: `profile` is no schedule.
    """
    given = schedule_of(profile)
    return profiler.schedule if given is None and isinstance(profiler, PiperProfiler) else given
