"""Plans with nothing but exchanges, and a plain fluid model of the time that these take on shared links.

The model has no queues of events. It goes from one moment to the next at which any exchange changes, and there
computes the rate of every exchange anew, in fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.communication.all_to_all import AllToAllInstruction
from lightning_piper.ops.communication.gather_samples import GatherSamplesInstruction
from lightning_piper.ops.communication.reduce import ReduceScatterInstruction
from lightning_piper.ops.instruction import neighbors
from lightning_piper.plan.instructions import (
    AllGatherInstruction,
    AllReduceInstruction,
    Collective,
    Instruction,
    Irecv,
    SendInstruction,
    WaitSend,
    WaitWork,
)
from lightning_piper.simulate import Network, Number, SharedLink
from lightning_piper.simulate.engine import Trace, run_in_virtual_time
from lightning_piper.simulate.network import HierarchicalRing


class Delay(Instruction):
    """Work that takes the time of its node."""

    op: ClassVar[str] = "delay"


def traced(plans: Mapping[int, list[Instruction]], delays: Mapping[int, Number], network: Network) -> Trace:
    """Run plans that belong to no DAG. A delay takes the time of its node."""
    dag: Any = SimpleNamespace(nodes=defaultdict(lambda: SimpleNamespace(origin=None)))
    work: Any = SimpleNamespace(
        of=lambda instruction, _: delays[instruction.node], measured=lambda node: None
    )
    listed: Any = {device: SimpleNamespace(instructions=plan) for device, plan in plans.items()}
    return run_in_virtual_time(dag, listed, work, network)


def bytes_of(count: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec((count,), torch.uint8, (1,)),)


@dataclass(frozen=True, kw_only=True)
class Shift(Collective):
    """Each member sends all of its bytes to the member that is `steps` further."""

    op: ClassVar[str] = "shift"
    direct: ClassVar[bool] = True
    steps: int
    sent: int

    @property
    def routes(self) -> tuple[tuple[int, int], ...]:
        return neighbors(self.members, self.steps)

    @property
    def nbytes(self) -> int:
        return self.sent


KINDS = ("send", "all_reduce", "reduce_scatter", "all_gather", "gather_samples", "all_to_all", "shift")


@dataclass(frozen=True)
class Exchange:
    """A message from the first to the second member, or a collective.

    Attributes:
        delays: The time that each member takes before it joins.
        after: An earlier exchange. Each of its members waits for it before its delay. None: no member waits.
        communicator: The communicator of a collective. One group may have several.
        steps: The distance of a shift.
    """

    kind: str
    members: tuple[int, ...]
    nbytes: int
    delays: tuple[Number, ...]
    after: int | None = None
    communicator: str = "a"
    steps: int = 1

    def names(self, k: int, network: Network) -> set[tuple[int, str]]:
        """Return the named communicators that this exchange, the k-th one, needs on its members."""
        row = f"s{k}" if self.kind == "send" else self.communicator
        name = network.communicators.get(row)
        return set() if name is None else {(member, name) for member in self.members}

    @property
    def lane(self) -> tuple[object, ...]:
        """Exchanges of one lane run one after the other."""
        return (self.members, "send" if self.kind == "send" else self.communicator)


Times = list[tuple[Number, Number]]  # start and end of each exchange


def simulated(exchanges: Sequence[Exchange], network: Network) -> Times:
    """Return the times in the simulator. Each exchange has a stream of its own on each member."""
    plans: dict[int, list[Instruction]] = {d: [] for e in exchanges for d in e.members}
    delays: dict[int, Number] = {}
    for k, exchange in enumerate(exchanges):
        for i, (device, delay) in enumerate(zip(exchange.members, exchange.delays, strict=True)):
            about: dict[str, Any] = {"label": "", "stream": f"s{k}"}
            if exchange.after is not None and device in (before := exchanges[exchange.after]).members:
                receives = before.kind == "send" and device == before.members[1]
                sends = before.kind == "send" and not receives
                node = 100 * exchange.after + receives
                channel: Any = before.members
                plans[device].append(
                    WaitSend(node=node, channel=channel, **about) if sends else WaitWork(node=node, **about)
                )
            delays[100 * k + 2 + i] = delay
            plans[device] += [Delay(node=100 * k + 2 + i, **about), _joined(exchange, k, i)]
    spans = traced(plans, delays, network).spans
    found = [
        {(s.start, s.end) for s in spans if s.node in (100 * k, 100 * k + 1)} for k in range(len(exchanges))
    ]
    assert all(len(times) == 1 for times in found), "all members have the same times"
    return [times.pop() for times in found]


def _joined(exchange: Exchange, k: int, i: int) -> Instruction:
    """Return the instruction by which member i joins exchange k."""
    tensors = bytes_of(exchange.nbytes)
    about: dict[str, Any] = {"node": 100 * k, "label": "", "stream": f"s{k}"}
    if exchange.kind == "send":
        channel: Any = exchange.members
        if i == 0:
            return SendInstruction(**about, channel=channel, tensors=tensors)
        return Irecv(**{**about, "node": 100 * k + 1}, channel=channel, message=100 * k, tensors=tensors)
    about |= {"members": exchange.members, "communicator": exchange.communicator}
    bucket: Any = SimpleNamespace(whole=SimpleNamespace(nbytes=exchange.nbytes))
    match exchange.kind:
        case "all_reduce":
            return AllReduceInstruction(**about, tensors=tensors)
        case "reduce_scatter":
            return ReduceScatterInstruction(**about, bucket=bucket)
        case "all_gather":
            return AllGatherInstruction(**about, bucket=bucket, kept=False)
        case "gather_samples":
            return GatherSamplesInstruction(**about, tensors=tensors)
        case "all_to_all":
            return AllToAllInstruction(**about, direction="dispatch", tensor=tensors[0])
    return Shift(**about, steps=exchange.steps, sent=exchange.nbytes)


class Part(NamedTuple):
    """A part of an exchange: first a latency, then bytes on all routes at once.

    Attributes:
        routes: (sender, receiver) -> bytes on this route while the part moves one byte.
        width: The largest number of bytes that the part moves per unit of time; None is unlimited.
    """

    latency: Number
    nbytes: Number
    width: Number | None
    routes: Mapping[tuple[int, int], Number]


def ring(members: Sequence[int], steps: int = 1) -> dict[tuple[int, int], Number]:
    n = len(members)
    return {(members[i], members[(i + steps) % n]): 1 for i in range(n) if steps % n}


def parts_of(exchange: Exchange, network: Network) -> list[Part]:
    """Return the parts of an exchange, as the documentation describes them."""
    members, size, n = exchange.members, Fraction(exchange.nbytes), len(exchange.members)
    if exchange.kind == "send":
        link: Any = network.channels.get((members[0], members[1]), network.link)
        return [Part(link.latency, size, link.bandwidth, {(members[0], members[1]): 1})]
    link = network.groups.get(members, network.link)
    rings = {"all_reduce": 2, "all_to_all": 0, "shift": 0}.get(exchange.kind, 1)
    if isinstance(link, HierarchicalRing) and rings:
        nodes, each = len(link.nodes), len(link.nodes[0])
        inside = Part(
            (each - 1) * link.inside.latency,
            (each - 1) * size / each,
            link.inside.bandwidth,
            {route: 1 for node in link.nodes for route in ring(node)},
        )
        across = Part(
            (nodes - 1) * link.across.latency,
            (nodes - 1) * (size / each) / nodes,
            link.across.bandwidth,
            {route: 1 for k in range(each) for route in ring([node[k] for node in link.nodes])},
        )
        ways = {"all_reduce": [inside, across, across, inside], "reduce_scatter": [inside, across]}
        return ways.get(exchange.kind, [across, inside])
    link = link.across if isinstance(link, HierarchicalRing) else link
    if exchange.kind == "shift":
        return [Part(link.latency, size, link.bandwidth, ring(members, exchange.steps))]
    if exchange.kind == "all_to_all":
        pairs = {(a, b): Fraction(1, n - 1) for a in members for b in members if a != b}
        return [Part((n - 1) * link.latency, (n - 1) * size / n, link.bandwidth, pairs)]
    steps = rings * (n - 1)
    return [Part(steps * link.latency, steps * size / n, link.bandwidth, ring(members))]


def loads_of(part: Part, shared: Sequence[SharedLink]) -> dict[tuple[int, str], Number]:
    """Return the load of each direction of a shared link while a part moves one byte."""
    found: dict[tuple[int, str], Number] = {}
    for number, link in enumerate(shared):
        for (sender, receiver), share in part.routes.items():
            for near, far, side in ((sender, receiver, "out"), (receiver, sender, "in")):
                beyond = far not in link.devices if link.peers is None else far in link.peers
                if near in link.devices and beyond:
                    found[number, side] = found.get((number, side), 0) + share
    return found


def rates_of(moving: Mapping[int, Part], shared: Sequence[SharedLink]) -> dict[int, Fraction]:
    """Return the max-min fair rates of the parts that move, and check that they are fair."""
    loads = {k: loads_of(part, shared) for k, part in moving.items()}
    rates: dict[int, Fraction] = {}

    def used(port: tuple[int, str], level: Fraction) -> Fraction:
        """Return the load of a port if the rates that may still rise are `level`."""
        return sum((rates.get(k, level) * own[port] for k, own in loads.items() if port in own), Fraction(0))

    ports = {port: Fraction(shared[port[0]].bandwidth) for own in loads.values() for port in own}
    while rising := moving.keys() - rates.keys():
        ends = [Fraction(width) for k in rising if (width := moving[k].width) is not None]
        for port, width in ports.items():
            fixed, one = used(port, Fraction(0)), used(port, Fraction(1))
            if one > fixed:
                ends.append((width - fixed) / (one - fixed))
        level = min(ends)
        full = {port for port, width in ports.items() if used(port, level) == width}
        stopped = {k for k in rising if moving[k].width == level or full & loads[k].keys()}
        assert stopped
        rates |= dict.fromkeys(stopped, level)
    for port, width in ports.items():
        assert used(port, Fraction(0)) <= width
    for k, rate in rates.items():  # its own link, or a full port on which no part is faster, stops each part
        assert rate == moving[k].width or any(
            used(port, Fraction(0)) == ports[port]
            and rate == max(rates[j] for j, own in loads.items() if port in own)
            for port in loads[k]
        )
    return rates


def fluid(exchanges: Sequence[Exchange], network: Network) -> Times:
    """Return the times in the fluid model."""
    names = [exchange.names(k, network) for k, exchange in enumerate(exchanges)]
    asked: dict[int, Number] = {}  # exchange -> time at which it asked for its communicators
    starts: dict[int, Number] = {}
    ends: dict[int, Number] = {}
    left = [parts_of(exchange, network) for exchange in exchanges]  # the parts that are not over
    until: dict[int, Number] = {}  # exchange -> end of the latency of its first part
    bytes_left: dict[int, Number] = {}  # exchange whose bytes move -> bytes of its first part
    now: Number = 0

    def ready(k: int) -> Number | None:
        """Return when an exchange may start; None if this is not known yet."""
        exchange, found = exchanges[k], list[Number]()
        before = [j for j in range(k) if exchanges[j].lane == exchange.lane]
        for member, delay in zip(exchange.members, exchange.delays, strict=True):
            j = exchange.after
            if j is not None and member in exchanges[j].members:
                if j not in ends:
                    return None
                delay += ends[j]
            found.append(delay)
        if any(j not in ends for j in before):
            return None
        return max(found + [ends[j] for j in before])

    while len(ends) < len(exchanges):
        later = []
        changed = True
        while changed:
            changed, later = False, []
            for k in range(len(exchanges)):
                if k in ends:
                    continue
                if k not in starts:
                    begin = ready(k)
                    if begin is None or begin > now:
                        later += [] if begin is None else [begin]
                        continue
                    asked[k] = begin
                    if any(asked[j] < begin and names[j] & names[k] for j in asked.keys() - ends.keys()):
                        continue
                    starts[k], until[k], changed = now, now + left[k][0].latency, True
                if k in until and until[k] <= now:
                    del until[k]
                    bytes_left[k], changed = left[k][0].nbytes, True
                if k in until:
                    later.append(until[k])
                    continue
                part = left[k][0]
                if not bytes_left[k] or (part.width is None and not loads_of(part, network.shared)):
                    del left[k][0], bytes_left[k]
                    changed = True
                    if left[k]:
                        until[k] = now + left[k][0].latency
                    else:
                        ends[k] = now
        if len(ends) == len(exchanges):
            break
        rates = rates_of({k: left[k][0] for k in bytes_left}, network.shared)
        step = min([*(time - now for time in later), *(bytes_left[k] / rate for k, rate in rates.items())])
        assert step > 0
        for k, rate in rates.items():
            bytes_left[k] -= rate * step
        now += step
    return [(starts[k], ends[k]) for k in range(len(exchanges))]
