"""The time that host threads need to issue the instructions of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from lightning_piper.common.limits import integer, shown
from lightning_piper.errors import SimulationError
from lightning_piper.plan.instructions import Instruction
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number, checked


@dataclass(frozen=True)
class IssueCost:
    """Host threads that issue instructions one after the other, and never wait for a device.

    Attributes:
        time: The time to issue an instruction, or a table: operation -> time. Operations without an entry
            take no time.
        devices: The number of devices for which one thread issues instructions (default: 1). The thread
            issues the first instruction of each of these devices, then the second one of each, and so on.

    Raises:
        SimulationError: A time is not a duration, or `devices` is not an integer of at least 1.
    """

    time: Number | Mapping[str, Number]
    devices: int = 1

    def __post_init__(self) -> None:
        """Check the fields."""
        times = self.time if isinstance(self.time, Mapping) else {"": self.time}
        for op, time in times.items():
            checked(f"IssueCost: the time{op and f' of {shown(op)}'}", time)
        if (integer(self.devices) or 0) < 1:
            raise SimulationError(
                f"IssueCost(devices={shown(self.devices)}) is not usable. Give the number of devices of one thread, at least "
                "1 [PIPER-T003]"
            )

    def times(self, plans: Mapping[int, Plan]) -> dict[int, list[Number]]:
        """Return, for each device, the times at which its instructions have been issued, in plan order."""
        found: dict[int, list[Number]] = {device: [] for device in plans}
        devices = sorted(plans)
        for first in range(0, len(devices), self.devices):
            served = devices[first : first + self.devices]
            now: Number = 0
            for turn in zip_longest(*(plans[device].instructions for device in served)):
                for device, instruction in zip(served, turn, strict=True):
                    if instruction is not None:
                        now += self._of(instruction)
                        found[device].append(now)
        return found

    def _of(self, instruction: Instruction) -> Number:
        return self.time.get(instruction.op, 0) if isinstance(self.time, Mapping) else self.time
