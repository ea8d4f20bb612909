"""The schedule of recorded steps: which training steps a recording measures and writes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_piper.common.limits import INDEX, integer, shown
from lightning_piper.errors import PiperError

OFF, WARMUP, ACTIVE = "off", "warmup", "active"


@dataclass(frozen=True)
class Schedule:
    """Cycles of training steps, as in `torch.profiler.schedule`.

    Args:
        wait: The number of steps at the start of a cycle that are not recorded (default: 5).
        warmup: The number of steps after the `wait` steps that are measured and discarded, to warm up the
            recorder (default: 1).
        active: The number of steps after the `warmup` steps that are recorded (default: 3).
        repeat: The number of cycles (default: 1); 0 is unlimited.
        kernels: Whether active steps also run torch.profiler on every process, with operators and kernels
            labeled by node.

    Raises:
        PiperError: A number is invalid.
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
                raise PiperError(
                    f"Schedule({field.name}={shown(value)}) is not usable. Give an integer from {least[field.name]} to "
                    f"{INDEX - 1} [PIPER-S001]"
                )
            object.__setattr__(self, field.name, number)

    def phase(self, step: int) -> str:
        """Return `OFF`, `WARMUP` or `ACTIVE` for a step. Steps count from 0."""
        cycle, position = divmod(step, self.wait + self.warmup + self.active)
        if (self.repeat and cycle >= self.repeat) or position < self.wait:
            return OFF
        return WARMUP if position < self.wait + self.warmup else ACTIVE

    def is_first_active(self, step: int) -> bool:
        """Return whether a step is the first active step of its cycle."""
        return (
            self.phase(step) == ACTIVE
            and step % (self.wait + self.warmup + self.active) == self.wait + self.warmup
        )


def schedule_of(given: object) -> Schedule | None:
    """Return the schedule of `PiperStrategy(profile=...)`. True is the default schedule; False and None
    record nothing.

    Raises:
        PiperError: The value is not a schedule, a boolean or None.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Schedule()
    if isinstance(given, Schedule):
        return given
    raise PiperError(
        f"PiperStrategy(profile={shown(given)}) is not usable. Give True, or a piper.Schedule such as "
        "piper.Schedule(wait=5, warmup=1, active=3, repeat=1) [PIPER-S001]"
    )
