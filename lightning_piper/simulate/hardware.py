"""Hardware that work is timed for: how fast devices compute, what they hold, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_piper.simulate.network import Link


@dataclass(frozen=True)
class Hardware:
    """Equal devices, numbered so that those that are joined best are next to each other.

    Attributes:
        name: of the device.
        memory: bytes of one device.
        flops: floating point operations a second, by the data type's name without `torch.`, such as `bfloat16`.
        bandwidth: of a device's memory, bytes a second.
        links: (n, link), the nearest first: n devices in a row, counted from a multiple of n, are joined by this link. The last
            one joins all others, too. Latency in seconds, bandwidth in bytes a second and direction.
        host: between a device and the memory of its host.
        host_memory: bytes of the host for each device.
        efficiency: share of `flops` and `bandwidth` that real operations reach.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    links: tuple[tuple[int, Link], ...]
    host: Link
    host_memory: int
    efficiency: float = 1.0

    def link(self, first: int, last: int) -> Link:
        """The link that joins these two devices, and so a ring of all between them."""
        return next((link for n, link in self.links if first // n == last // n), self.links[-1][1])
