"""Which steps of a training are recorded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_piper.errors import PiperError
from lightning_piper.limits import INDEX, integer, shown

OFF, WARMUP, ACTIVE = "off", "warmup", "active"


@dataclass(frozen=True)
class Schedule:
    """Cycles of training steps, as `torch.profiler.schedule` counts them.

    Args:
        wait: steps of a cycle that are left alone.
        warmup: steps that are measured and thrown away, so that the recorder itself has warmed up.
        active: steps that are recorded.
        repeat: number of cycles; 0 goes on as long as the training does.
        kernels: in active steps, also run torch.profiler on every process, with its operators and kernels labelled by node.

    Raises:
        PiperError: a number that cannot be used.
    """

    wait: int = 5
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    kernels: bool = False

    def __post_init__(self) -> None:
        least = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0}
        for field in fields(self):
            if field.name not in least:
                continue
            value = getattr(self, field.name)
            number = integer(value)
            if number is None or not least[field.name] <= number < INDEX:
                raise PiperError(f"Schedule({field.name}={shown(value)}): give a whole number >= {least[field.name]}")
            object.__setattr__(self, field.name, number)

    def phase(self, step: int) -> str:
        """`OFF`, `WARMUP` or `ACTIVE`, of a step counted from 0."""
        cycle, place = divmod(step, self.wait + self.warmup + self.active)
        if (self.repeat and cycle >= self.repeat) or place < self.wait:
            return OFF
        return WARMUP if place < self.wait + self.warmup else ACTIVE


def schedule_of(given: object) -> Schedule | None:
    """What `PiperStrategy(profile=...)` means: True is the default schedule, False and None record nothing.

    Raises:
        PiperError: it is something else.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Schedule()
    if isinstance(given, Schedule):
        return given
    raise PiperError(
        f"PiperStrategy(profile={shown(given)}): give True, or a lightning_piper.profile.Schedule(wait, warmup, active, repeat)"
    )
