"""The time of communication: a latency and a bandwidth for each channel and each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from lightning_piper.errors import SimulationError
from lightning_piper.limits import shown
from lightning_piper.plan.instructions import Channel, Collective
from lightning_piper.simulate.durations import Number, checked


@dataclass(frozen=True)
class Link:
    """The latency and bandwidth of one channel or group.

    Attributes:
        latency: The time until the first byte arrives, in the unit of the durations.
        bandwidth: Bytes per unit of time; None is unlimited.
    """

    latency: Number = 0
    bandwidth: Number | None = None

    def __post_init__(self) -> None:
        checked("latency", self.latency)
        if self.bandwidth is not None:
            checked("bandwidth", self.bandwidth, positive=True)

    def time(self, nbytes: int, parts: int = 1) -> Number:
        """Return the time of one message of `nbytes / parts` bytes."""
        if self.bandwidth is None:
            return self.latency
        return self.latency + Fraction(nbytes, parts) / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The links between devices.

    Attributes:
        link: The link of every channel and group without an entry.
        channels: Links by (sending device, receiving device).
        groups: Links between neighbours in a ring, by the group's devices.
        host: The link between each device and its host's memory, which carries one copy in each direction at
            once.

    Raises:
        SimulationError: A value is not a Link.
    """

    link: Link = Link()
    channels: Mapping[Channel, Link] = field(default_factory=dict)
    groups: Mapping[tuple[int, ...], Link] = field(default_factory=dict)
    host: Link = Link()

    def __post_init__(self) -> None:
        single = {"link": self.link, "host": self.host}
        several = {"channels": self.channels, "groups": self.groups}
        for name, link in single.items():
            if not isinstance(link, Link):
                raise SimulationError(f"Network({name}={shown(link)}): give a Link [PIPER-T003]")
        for name, links in several.items():
            if not isinstance(links, Mapping) or not all(isinstance(link, Link) for link in links.values()):
                raise SimulationError(
                    f"Network({name}={shown(links)}): give a mapping from devices to Links [PIPER-T003]"
                )

    def transfer(self, channel: Channel, nbytes: int) -> Number:
        """Return the time of a transfer from the moment when both sides are ready."""
        return self.channels.get(channel, self.link).time(nbytes)

    def collective(self, instruction: Collective) -> Number:
        """Return the time of a collective from the moment when all members are ready.

        It takes `Collective.rings` rounds of the ring, or one message if it is direct.
        """
        n = len(instruction.members)
        link = self.groups.get(instruction.members, self.link)
        if instruction.direct:
            return link.time(instruction.nbytes)
        return instruction.rings * (n - 1) * link.time(instruction.nbytes, n)
