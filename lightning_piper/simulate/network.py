"""The time of communication: a latency and a bandwidth for each channel and each group, and links that
several exchanges share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from lightning_piper.common.limits import integer, shown
from lightning_piper.errors import SimulationError
from lightning_piper.ops.instruction import neighbors
from lightning_piper.plan.instructions import Channel, Collective, SendInstruction
from lightning_piper.simulate.durations import Number, checked


@dataclass(frozen=True)
class Link:
    """The latency and bandwidth of one channel or group.

    Attributes:
        latency: The time until the first byte arrives, in the unit of the durations.
        bandwidth: Bytes per unit of time; None is unlimited.

    Raises:
        SimulationError: A value is not a valid number.
    """

    latency: Number = 0
    bandwidth: Number | None = None

    def __post_init__(self) -> None:
        checked("Link: latency", self.latency)
        if self.bandwidth is not None:
            checked("Link: bandwidth", self.bandwidth, positive=True)

    def time(self, nbytes: int, parts: int = 1) -> Number:
        """Return the time of one message of `nbytes / parts` bytes."""
        if self.bandwidth is None:
            return self.latency
        return self.latency + Fraction(nbytes, parts) / self.bandwidth


@dataclass(frozen=True)
class SharedLink:
    """A link that several devices share, such as the network card of a node.

    Exchanges that run at the same time share its bandwidth. Each direction has the bandwidth `bandwidth`.

    Attributes:
        devices: The devices that send and receive over the link.
        bandwidth: Bytes per unit of time in each direction.
        peers: The devices at the other end (default: all other devices).

    Raises:
        SimulationError: The devices or peers are not integers, or the bandwidth is not a number > 0.
    """

    devices: Collection[int]
    bandwidth: Number
    peers: Collection[int] | None = None

    def __post_init__(self) -> None:
        checked("SharedLink: bandwidth", self.bandwidth, positive=True)
        for name, devices in (("devices", self.devices), ("peers", self.peers or (0,))):
            if not isinstance(devices, Collection) or not devices or None in map(integer, devices):
                raise SimulationError(
                    f"SharedLink({name}={shown(devices)}) is not usable. Give a list of devices such as [0, 1] [PIPER-T003]"
                )

    def reaches(self, device: int) -> bool:
        """Return whether a device is at the other end of the link."""
        return device not in self.devices if self.peers is None else device in self.peers


@dataclass(frozen=True)
class HierarchicalRing:
    """The links of a group on several nodes, each with equally many members.

    A sum or a gather uses two kinds of rings. The members on one node form a ring. The k-th members of all
    nodes form a ring across the nodes, which carries the k-th part of the bytes. Exchanges that do not use
    rings use the link `across`.

    Attributes:
        nodes: For each node, the members on it.
        inside: The link between neighbors of a ring on one node.
        across: The link between neighbors of a ring across the nodes.
    """

    nodes: tuple[tuple[int, ...], ...]
    inside: Link
    across: Link

    def phases(self, instruction: Collective) -> list[Phase]:
        """Return the phases of a sum or a gather, in order. All rings inside of nodes are one phase, and all
        rings across nodes are one phase. A gather goes across nodes first, and a sum goes inside of nodes
        first. An all-reduce has each of the two phases twice."""
        count, each, nbytes = len(self.nodes), len(self.nodes[0]), instruction.nbytes
        inside = Phase(
            (each - 1) * self.inside.latency,
            Fraction((each - 1) * nbytes, each),
            self.inside.bandwidth,
            tuple(route for node in self.nodes for route in neighbors(node)),
            1,
        )
        across = Phase(
            (count - 1) * self.across.latency,
            Fraction((count - 1) * nbytes, count * each),
            self.across.bandwidth,
            tuple(route for ring in zip(*self.nodes, strict=True) for route in neighbors(ring)),
            1,
        )
        if instruction.rings == 2:
            return [inside, across, across, inside]
        return [across, inside] if instruction.gathers else [inside, across]


class Phase(NamedTuple):
    """A phase of an exchange: after the latency, bytes travel on several channels at the same rate.

    Attributes:
        latency: The time before the first bytes arrive.
        nbytes: The bytes that each member sends.
        bandwidth: The largest number of bytes that a member sends per unit of time; None is unlimited.
        routes: The channels on which bytes travel at the same time.
        share: The share of `nbytes` that a member sends on each channel of `routes` that leaves it.
    """

    latency: Number
    nbytes: Number
    bandwidth: Number | None
    routes: tuple[Channel, ...]
    share: Number

    @property
    def time(self) -> Number:
        """The time of the phase if no other exchange uses its links."""
        return self.latency + (0 if self.bandwidth is None else self.nbytes / self.bandwidth)


@dataclass(frozen=True)
class Network:
    """The links between devices.

    Attributes:
        link: The link of every channel and group without an entry.
        channels: (sending device, receiving device) -> link.
        groups: Devices of a group -> the link between neighbors in its ring, or its hierarchical ring.
        host: The link between each device and its host's memory. A copy takes the time of one message on it.
        shared: Links that exchanges share (default: exchanges do not delay each other). An exchange with a
            duration in the table of durations does not use them.
        communicators: Stream of messages, or communicator of collectives -> name. On each device, exchanges
            with the same name run one after the other, as if one communicator carried them (default: each
            channel and each group has a communicator of its own).

    Raises:
        SimulationError: A value has the wrong type.
    """

    link: Link = Link()
    channels: Mapping[Channel, Link] = field(default_factory=dict)
    groups: Mapping[tuple[int, ...], Link | HierarchicalRing] = field(default_factory=dict)
    host: Link = Link()
    shared: Sequence[SharedLink] = ()
    communicators: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the types of the fields."""
        single = {"link": self.link, "host": self.host}
        several: dict[str, tuple[Any, Any, str]] = {
            "channels": (self.channels, Link, "pairs of devices"),
            "groups": (self.groups, Link | HierarchicalRing, "tuples of devices"),
        }
        for name, link in single.items():
            if not isinstance(link, Link):
                raise SimulationError(
                    f"Network({name}={shown(link)}) is not usable. Give a Link [PIPER-T003]"
                )
        for name, (links, kind, keys) in several.items():
            if not isinstance(links, Mapping) or not all(isinstance(link, kind) for link in links.values()):
                raise SimulationError(
                    f"Network({name}={shown(links)}) is not usable. Give a mapping from {keys} to Links, such as "
                    "{(0, 1): Link(1)} [PIPER-T003]"
                )
        if not isinstance(self.shared, Sequence) or not all(isinstance(x, SharedLink) for x in self.shared):
            raise SimulationError(
                f"Network(shared={shown(self.shared)}) is not usable. Give a list of SharedLinks [PIPER-T003]"
            )
        names = self.communicators
        if not isinstance(names, Mapping) or not all(
            isinstance(name, str) for item in names.items() for name in item
        ):
            raise SimulationError(
                f"Network(communicators={shown(names)}) is not usable. Give a mapping from streams to names, such as "
                '{"send": "pair", "recv": "pair"} [PIPER-T003]'
            )

    def transfer(self, channel: Channel, nbytes: int) -> Number:
        """Return the time of a message of `nbytes` bytes on a channel, from the moment when both devices are
        ready."""
        return self.channels.get(channel, self.link).time(nbytes)

    def collective(self, instruction: Collective) -> Number:
        """Return the time of a collective from the moment when all members are ready.

        A direct collective takes the time of one message. A group with a hierarchical ring takes the time of
        the ring's phases. Other collectives go `Collective.rings` times around the ring, n - 1 messages each
        time.
        """
        n = len(instruction.members)
        link = self._link(instruction)
        if isinstance(link, HierarchicalRing):
            return sum(phase.time for phase in link.phases(instruction))
        if instruction.direct:
            return link.time(instruction.nbytes)
        return instruction.rings * (n - 1) * link.time(instruction.nbytes, n)

    def _link(self, instruction: Collective) -> Link | HierarchicalRing:
        """Return the link of the collective's group. If this is a hierarchical ring, but the collective does
        not go around a ring of all members, return the ring's link `across`."""
        link = self.groups.get(instruction.members, self.link)
        around = not instruction.direct and instruction.routes == neighbors(instruction.members)
        return link.across if isinstance(link, HierarchicalRing) and not around else link

    def phases(self, instruction: SendInstruction | Collective) -> list[Phase]:
        """Return the phases of an exchange, in order. If it does not share links, the phases together take as
        long as `transfer` or `collective` returns."""
        if isinstance(instruction, SendInstruction):
            link = self.channels.get(instruction.channel, self.link)
            nbytes = sum(spec.nbytes for spec in instruction.tensors)
            return [Phase(link.latency, nbytes, link.bandwidth, (instruction.channel,), 1)]
        found, n, routes = self._link(instruction), len(instruction.members), instruction.routes
        if isinstance(found, HierarchicalRing):
            return found.phases(instruction)
        steps, parts = (1, 1) if instruction.direct else (instruction.rings * (n - 1), n)
        share = Fraction(n, len(routes)) if routes else 0
        sent = Fraction(steps * instruction.nbytes, parts)
        return [Phase(steps * found.latency, sent, found.bandwidth, routes, share)]
