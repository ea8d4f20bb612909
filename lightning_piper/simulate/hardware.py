"""Hardware specifications: the speed and memory of devices, and the links between them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_piper.common.limits import integer, kind_of, shown
from lightning_piper.common.user_files import explained, name_of, read_json
from lightning_piper.errors import SimulationError
from lightning_piper.plan.instructions import Channel, Collective, SendInstruction
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number, checked
from lightning_piper.simulate.network import HierarchicalRing, Link, Network, SharedLink

LARGEST = 10**18  # flops, bytes and bandwidths of a specification must be smaller


class Collectives(NamedTuple):
    """Measured times of collectives, as links. A collective takes as long as one message over its link with
    the bytes of the whole tensor.

    Attributes:
        sum: All-reduce.
        scatter: Reduce-scatter.
        gather: All-gather.
    """

    sum: Link
    scatter: Link
    gather: Link


class SharedBandwidth(NamedTuple):
    """The bandwidth that devices share on a link, such as the network cards of a node.

    Attributes:
        devices: The number of consecutive devices that share the bandwidth.
        bandwidth: Bytes per second in each direction, for all of these devices together.
        single: The bytes per second that one of them reaches while the other devices are idle.
    """

    devices: int
    bandwidth: Number
    single: Number


@dataclass(frozen=True)
class Hardware:
    """Equal devices. Consecutive devices have the fastest links to each other.

    Attributes:
        name: The name of the device.
        memory: The bytes of one device.
        flops: Floating point operations per second by dtype name, such as `bfloat16`.
        bandwidth: The bandwidth of a device's memory in bytes per second.
        links: (n, link), the nearest first. The link joins n consecutive devices, starting at a multiple of
            n. The last link also joins all pairs that no link joins in this way. Latency is in seconds.
            Bandwidth is in bytes per second and direction, while all devices send.
        host: The link between a device and its host's memory.
        host_memory: The bytes of host memory for each device.
        efficiency: The share of `flops` and `bandwidth` that real operations reach.
        collectives: Number of members -> measured times of collectives. The search computes the times of
            other groups as rings over `links`.
        at_once: The number of devices that can compute at full speed at the same time, if devices are
            processes that share cores. Otherwise None.
        step: Seconds that a step takes on each device in addition to its passes, messages, sums and updates.
        shared: For each of `links`, the bandwidth that devices share on it, or None (default: no link is
            shared).
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    links: tuple[tuple[int, Link], ...]
    host: Link
    host_memory: int
    efficiency: float = 1.0
    collectives: Mapping[int, Collectives] = field(default_factory=dict)
    at_once: int | None = None
    step: float = 0
    shared: tuple[SharedBandwidth | None, ...] = ()

    @classmethod
    def read(cls, name: str | PathLike[str]) -> Hardware:
        """Read a specification.

        Args:
            name: The name of one of the package's specifications (`known()` lists them), or the path of a
                JSON file.

        Raises:
            SimulationError: `name` is neither of these, the file cannot be read, or its content is invalid.
        """
        own = [path for path in _FOLDER.glob("*.json") if path.stem == str(name)]
        if not own and (not isinstance(name, str | PathLike) or not str(name).endswith(".json")):
            names = ", ".join(known())
            raise SimulationError(
                f"there is no hardware {name_of(name)}. Give one of {names}, or a JSON file (*.json)"
                " [PIPER-T002]"
            )
        try:
            content = read_json(own[0] if own else name)
        except FileNotFoundError:
            raise SimulationError(
                f"hardware file {name_of(name)} does not exist. Give the path of a JSON file [PIPER-T002]"
            ) from None
        except (OSError, ValueError) as error:
            raise SimulationError(
                f"hardware file {name_of(name)} cannot be read as JSON: {explained(error)} [PIPER-T002]"
            ) from None
        return _hardware(f"hardware file {name_of(name)}", content)

    @classmethod
    def measure(cls) -> Hardware:
        """Measure this machine's CPU as one device.

        This measures matrix products in float32, float64 and bfloat16, and memory copies. The system reports
        the memory size. A message is taken to be two memory copies, as between processes of one machine. The
        host does not have memory in addition to the device's memory.
        """
        bandwidth = _copied()
        link = Link(1e-5, bandwidth / 2)  # one copy into shared memory, and one out of it
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flops = {
            str(dtype).removeprefix("torch."): _multiplied(dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        }
        return cls("this machine's CPU", memory, flops, bandwidth, ((65536, link),), link, 0)

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return floating point operations per second on tensors of a dtype.

        Raises:
            SimulationError: The specification does not have the dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise SimulationError(
                f"hardware {self.name!r} has no speed for {name}, only for {', '.join(self.flops)}. Give a hardware file "
                f"whose flops have {name!r} [PIPER-T002]"
            )
        return self.flops[name]

    def link(self, first: int, last: int) -> Link:
        """Return the nearest link that joins two devices. If `links` does not join them, this is the last
        link. A ring of all devices from `first` to `last` uses the same link."""
        return next((link for n, link in self.links if first // n == last // n), self.links[-1][1])

    def network(self, plans: Mapping[int, Plan]) -> Network:
        """Return the network of these plans: their channels and groups, and the links that devices share.

        A group on several nodes, with the same number of members on each and at least two, is a hierarchical
        ring.
        """
        channels: dict[Channel, Link] = {}
        groups: dict[tuple[int, ...], Link | HierarchicalRing] = {}
        for plan in plans.values():
            for instruction in plan.instructions:
                if isinstance(instruction, SendInstruction):
                    channels.setdefault(
                        instruction.channel, self._single_device_link(self._level(instruction.channel))[1]
                    )
                elif isinstance(instruction, Collective) and instruction.members not in groups:
                    groups[instruction.members] = self.ring(instruction.members, alone=True)
        return Network(channels=channels, groups=groups, host=self.host, shared=self._shared(sorted(plans)))

    def _level(self, devices: Iterable[int]) -> int:
        """Return the index in `links` of the nearest link that joins all of these devices, or of the last
        link."""
        low, high = min(devices), max(devices)
        levels = range(len(self.links) - 1)
        return next((k for k in levels if low // self.links[k][0] == high // self.links[k][0]), len(levels))

    def _single_device_link(self, level: int) -> tuple[int, Link]:
        """Return the entry of `links` with this index. A shared link gets the bandwidth that one device has
        while the other devices are idle."""
        count, link = self.links[level]
        shared = self.shared[level] if self.shared else None
        return count, link if shared is None else Link(link.latency, shared.single)

    def ring(self, members: Sequence[int], alone: bool = False) -> Link | HierarchicalRing:
        """Return the links of the collectives of a group of devices. A node is a set of devices that the next
        nearer link joins. If the group has the same number of members on each of several nodes, and at least
        two, it is a hierarchical ring. Otherwise it is a ring over one link.

        Args:
            members: The devices of the group.
            alone: Give shared links the bandwidth that one device has while the other devices are idle
                (default: the bandwidth while all devices send).
        """

        def link(level: int) -> Link:
            return (self._single_device_link(level) if alone else self.links[level])[1]

        level = self._level(members)
        nodes: dict[int, list[int]] = {}
        for member in members if level else ():
            nodes.setdefault(member // self.links[level - 1][0], []).append(member)
        counts = {len(node) for node in nodes.values()}
        if len(counts) != 1 or counts == {1}:
            return link(level)
        inside = link(max(self._level(node) for node in nodes.values()))
        return HierarchicalRing(tuple(map(tuple, nodes.values())), inside, link(level))

    def _shared(self, devices: Sequence[int]) -> list[SharedLink]:
        """Return the shared links between these devices. The devices at the other end of a shared link are
        the devices that this link joins with its own devices, but that no nearer link joins with them."""
        found = []
        for level, shared in enumerate(self.shared):
            if shared is None:
                continue
            # This link joins devices with equal values of `device // far`. A nearer link joins devices with
            # equal values of `device // near`.
            near = self.links[level - 1][0] if level else 1
            far = max(devices, default=0) + 1 if level == len(self.links) - 1 else self.links[level][0]
            for block in sorted({device // shared.devices for device in devices}):
                own = [device for device in devices if device // shared.devices == block]
                peers = frozenset(
                    device
                    for device in devices
                    if device // far == own[0] // far and device // near != own[0] // near
                )
                if peers:
                    found.append(SharedLink(own, shared.bandwidth, peers))
        return found


def known() -> list[str]:
    """Return the names of the package's hardware specifications."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


_FOLDER = Path(__file__).with_name("hardware")
_KEYS = ("name", "source", "memory", "flops", "bandwidth", "links", "host", "host_memory")


def _hardware(where: str, content: Any) -> Hardware:
    """Return the hardware that the content of a JSON file describes. `where` names the file in errors.

    Raises:
        SimulationError: The content is invalid.
    """
    _check_keys(where, content, _KEYS, ("efficiency",))
    if not isinstance(content["name"], str):
        raise SimulationError(f"{where}: name is {shown(content['name'])}. Give a string [PIPER-T002]")
    if not isinstance(content["flops"], dict) or not content["flops"]:
        raise SimulationError(
            f'{where}: flops is {shown(content["flops"])}. Give an object such as {{"float32": 6.7e13}} '
            "[PIPER-T002]"
        )
    if not isinstance(content["links"], list) or not content["links"]:
        raise SimulationError(
            f"{where}: links is {shown(content['links'])}. Give a list of at least one link [PIPER-T002]"
        )
    flops = {dtype: _number(where, f"flops of {shown(dtype)}", x) for dtype, x in content["flops"].items()}
    for dtype in flops:
        if dtype != "tfloat32" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise SimulationError(
                f"{where}: flops has {shown(dtype)}, which is not a data type. Give names such as 'bfloat16'"
                " [PIPER-T002]"
            )
    read = [_shared_link(f"{where}: links[{i}]", link) for i, link in enumerate(content["links"])]
    links = tuple((n, link) for n, link, _ in read)
    counts = [n for n, _ in links]
    if counts != sorted(set(counts)):
        raise SimulationError(
            f"{where}: links join {counts} devices. Give the links from the nearest to the farthest, each "
            "for more devices than the link before [PIPER-T002]"
        )
    efficiency = _number(where, "efficiency", content.get("efficiency", 1.0))
    if efficiency > 1:
        raise SimulationError(f"{where}: efficiency is {efficiency}. Give a number > 0 and <= 1 [PIPER-T002]")
    whole = {key: math.ceil(_number(where, key, content[key])) for key in ("memory", "host_memory")}
    host = _link(f"{where}: host", content["host"], ())[1]
    bandwidth = _number(where, "bandwidth", content["bandwidth"])
    return Hardware(
        content["name"],
        whole["memory"],
        flops,
        bandwidth,
        links,
        host,
        whole["host_memory"],
        efficiency,
        shared=tuple(shared for *_, shared in read),
    )


def _shared_link(where: str, content: Any) -> tuple[int, Link, SharedBandwidth | None]:
    """Read an entry of `links` from JSON data.

    Returns:
        The number of devices that the link joins, the link while all devices send, and the bandwidth that
        devices share on it (None: they share nothing).

    Raises:
        SimulationError: The data is invalid.
    """
    n, link = _link(where, content, ("devices",), ("shared",))
    if "shared" not in content:
        return n, link, None
    assert link.bandwidth is not None
    within = f"{where}: shared"
    _check_keys(within, content["shared"], ("devices", "bandwidth"), ())
    devices = integer(content["shared"]["devices"])
    if devices is None or not 1 <= devices <= n:
        raise SimulationError(
            f"{within}: devices is {shown(content['shared']['devices'])}. Give an integer from 1 to {n} "
            "[PIPER-T002]"
        )
    bandwidth = _number(within, "bandwidth", content["shared"]["bandwidth"])
    single = min(link.bandwidth, bandwidth)
    each = bandwidth if devices == 1 else bandwidth / devices
    return n, Link(link.latency, min(single, each)), SharedBandwidth(devices, bandwidth, single)


def _link(
    where: str, content: Any, more: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[int, Link]:
    """Read a link from JSON data.

    Args:
        where: The name of the link in errors.
        content: The data.
        more: `("devices",)` if the data must have this key in addition to latency and bandwidth.
        optional: Further keys that the data may have.

    Returns:
        The number of devices that the link joins (1 without the key `devices`), and the link.

    Raises:
        SimulationError: The data is invalid.
    """
    _check_keys(where, content, (*more, "latency", "bandwidth"), ("source", *optional))
    devices = integer(content["devices"]) if more else 1
    if devices is None or devices < 1:
        raise SimulationError(
            f"{where}: devices is {shown(content['devices'])}. Give an integer >= 1 [PIPER-T002]"
        )
    latency = checked(f"{where}: latency", content["latency"])
    return devices, Link(latency, _number(where, "bandwidth", content["bandwidth"]))


def _check_keys(where: str, content: Any, keys: Collection[str], optional: Collection[str]) -> None:
    """Check that the content is a dict with all of `keys`, and with no other keys except `optional`.

    Raises:
        SimulationError: The content is not a dict, lacks a key, or has an unknown key.
    """
    if not isinstance(content, dict):
        raise SimulationError(
            f"{where} is {kind_of(content)}. Give an object with {', '.join(keys)} [PIPER-T002]"
        )
    if missing := [key for key in keys if key not in content]:
        raise SimulationError(
            f"{where} lacks {missing[0]!r}. Give an object with {', '.join(keys)} [PIPER-T002]"
        )
    if unknown := [key for key in content if key not in keys and key not in optional]:
        raise SimulationError(
            f"{where}: the key {shown(unknown[0])} is unknown. Give one of {', '.join((*keys, *optional))} [PIPER-T002]"
        )


def _number(where: str, what: str, value: Any) -> float:
    """Return a value of JSON data if it is a number above 0 and below `LARGEST`.

    Raises:
        SimulationError: The value is not such a number.
    """
    # Do not use `checked`, because the numbers of large clusters exceed its limit of 1e15.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise SimulationError(f"{where}: {what} is {shown(value)}. Give a number > 0 and < 1e18 [PIPER-T002]")
    return value


def _best(run: Callable[[], object], calls: int = 5) -> float:
    """Return the seconds of the fastest of several calls, after one warmup call."""
    run()
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _multiplied(dtype: torch.dtype, size: int = 512) -> float:
    """Return the floating point operations per second of a matrix product on the CPU."""
    a = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: a @ a)


def _copied(nbytes: int = 1 << 26) -> float:
    """Return the bytes per second of a memory copy. Each byte counts twice, because it is read and
    written."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * nbytes / _best(lambda: target.copy_(source))
