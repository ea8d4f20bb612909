"""Simulate exchanges that share links or communicators, event by event in the order of time. An exchange is a
message or a collective.

Exchanges on a shared link divide its bandwidth by progressive filling. The rates of all exchanges rise
together until a link is full, or until an exchange reaches its own largest rate. The exchanges on the full
link, or this one exchange, keep their rates, and the other rates rise further. The result is max-min fair
(Bertsekas and Gallager 1992). When the bytes of an exchange start or stop to travel, rates change only for
exchanges that share links with it, directly or through other exchanges.
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any

from lightning_piper.plan.instructions import Channel
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.network import Network, Phase

# Port (one direction of a shared link) -> factor. An exchange with rate r sends factor * r through the port.
Loads = Mapping[int, Number]


@dataclass(slots=True, eq=False)
class Transfer:
    """An exchange that may delay other exchanges.

    Attributes:
        owner: The exchange.
        phases: The phases of the exchange that are not over (`network.Phase`). The last entry is the current
            phase.
        loads: The loads of each phase in `phases`.
        names: The communicators that the exchange occupies, as (device, name).
        start: The time at which the transfer got its communicators; None before.
        moving: Whether the latency of the current phase is over, so that its bytes travel.
        limit: The largest rate of the current phase; None is unlimited.
        remaining: The bytes of the current phase that have not arrived at the time `since`.
        rate: The bytes that travel per unit of time from `since` on.
        since: The time of the last change of `rate`.
        version: The number of events that were planned for the transfer. Only the newest one takes place.
    """

    owner: Any
    phases: list[Phase]
    loads: list[Loads]
    names: tuple[object, ...]
    start: Number | None = None
    moving: bool = False
    limit: Number | None = None
    remaining: Number = 0
    rate: Number = 0
    since: Number = 0
    version: int = 0


def progressive_filling(
    flows: Iterable[tuple[Transfer, Loads]], capacities: Mapping[int, Number]
) -> dict[Transfer, Number]:
    """Return the max-min fair rate of each transfer.

    Args:
        flows: (transfer, loads of its current phase). Each transfer uses at least one port.
        capacities: The bandwidth of each port.
    """
    # A port's `room` is the bandwidth that transfers with a final rate leave. Its `users` are the transfers
    # whose rates still rise, and `load` is the sum of their factors on the port.
    rising = dict(flows)
    room = {port: capacities[port] for loads in rising.values() for port in loads}
    load: dict[int, Number] = dict.fromkeys(room, 0)
    users: dict[int, dict[Transfer, None]] = {port: {} for port in room}
    for transfer, loads in rising.items():
        for port, times in loads.items():
            load[port] += times
            users[port][transfer] = None
    rates: dict[Transfer, Number] = {}
    while rising:
        levels = {port: room[port] / load[port] for port in users}  # port -> the rate at which it is full
        level = min(levels.values())
        stopped = {t: t.limit for t in rising if t.limit is not None and t.limit <= level}
        if not stopped:
            stopped = {t: level for port, at in levels.items() if at == level for t in users[port]}
        for transfer, rate in stopped.items():
            rates[transfer] = rate
            for port, times in rising.pop(transfer).items():
                room[port] -= rate * times
                load[port] -= times
                del users[port][transfer]
                if not users[port]:
                    del users[port]
    return rates


class Traffic:
    """The transfers of all devices, in virtual time. `request` adds a transfer, and each `advance` goes on to
    the next event."""

    def __init__(self, network: Network) -> None:
        """Prepare the ports of the network's shared links."""
        self._network = network
        self._links: dict[int, list[int]] = {}  # device -> indices in `shared` of the links that it shares
        for number, link in enumerate(network.shared):
            for device in dict.fromkeys(link.devices):
                self._links.setdefault(device, []).append(number)
        # Link k has two ports: 2k for bytes that its devices send, 2k + 1 for bytes that its devices receive.
        self._capacities = {
            port: exact(link.bandwidth)
            for k, link in enumerate(network.shared)
            for port in (2 * k, 2 * k + 1)
        }
        self._loads = functools.cache(self._loads_of)
        # Port -> the transfers whose bytes travel through it, with the loads of their current phases.
        self._on: dict[int, dict[Transfer, Loads]] = {port: {} for port in self._capacities}
        self._changed: dict[int, None] = {}  # ports that a transfer has entered or left since `_share`
        # Communicator -> its transfers in order. The first one has started, or waits for the other communicators
        # that it needs.
        self._queues: dict[object, deque[Transfer]] = {}
        # Heap of (time, number of the event, transfer, the transfer's version when the event was planned).
        self._events: list[tuple[Number, int, Transfer, int]] = []
        self._numbers = count()

    def _loads_of(self, routes: tuple[Channel, ...], share: Number) -> Loads:
        """Return the loads of a `Phase` with these routes and this share."""
        loads: dict[int, Number] = {}
        for sender, receiver in routes:
            for device, peer, side in ((sender, receiver, 0), (receiver, sender, 1)):
                for k in self._links.get(device, ()):
                    if self._network.shared[k].reaches(peer):
                        loads[2 * k + side] = loads.get(2 * k + side, 0) + share
        return loads

    def transfer(self, owner: object, phases: Iterable[Phase], names: tuple[object, ...]) -> Transfer | None:
        """Return the transfer of an exchange. Return None if the exchange uses no shared link and `names` is
        empty."""
        order = list(phases)[::-1]
        loads = [self._loads(phase.routes, phase.share) for phase in order]
        return Transfer(owner, order, loads, names) if any(loads) or names else None

    def request(self, time: Number, transfer: Transfer) -> None:
        """Start a transfer at this time, or later, as soon as all earlier transfers on its communicators are
        over."""
        self._at(time, transfer)

    def advance(self) -> tuple[Number, list[Transfer]] | None:
        """Go to the next time at which a transfer has an event.

        Returns:
            The time, and the transfers that end then, perhaps none. None if no transfer is left.
        """
        if not self._events:
            return None
        now, ended = self._events[0][0], list[Transfer]()
        while self._events and self._events[0][0] == now:
            _, _, transfer, version = heapq.heappop(self._events)
            if version == transfer.version:
                self._continue(now, transfer, ended)
        self._share(now)
        return now, ended

    def _at(self, time: Number, transfer: Transfer) -> None:
        """Plan the next event of a transfer, and cancel its earlier event."""
        transfer.version += 1
        heapq.heappush(self._events, (time, next(self._numbers), transfer, transfer.version))

    def _continue(self, now: Number, transfer: Transfer, ended: list[Transfer]) -> None:
        """Carry out the event of a transfer: it asks for its communicators, a latency ends, or a phase ends.

        If the last phase ends, `ended` gets the transfer, and transfers that waited for its communicators
        start.
        """
        # `start` is None before the transfer has its communicators; `moving` is False during a latency.
        if transfer.start is None:
            for name in transfer.names:
                self._queues.setdefault(name, deque()).append(transfer)
            self._start(now, transfer)
        elif not transfer.moving:
            self._move(now, transfer)
        else:
            self._end_phase(transfer)
            if transfer.phases:
                self._at(now + transfer.phases[-1].latency, transfer)
                return
            ended.append(transfer)
            for name in transfer.names:
                self._queues[name].popleft()
            for name in transfer.names:
                if self._queues[name]:
                    self._start(now, self._queues[name][0])

    def _start(self, now: Number, transfer: Transfer) -> None:
        """Start a transfer if it is the first one on all of its communicators and has not started yet."""
        if transfer.start is None and all(self._queues[name][0] is transfer for name in transfer.names):
            transfer.start = now
            self._at(now + transfer.phases[-1].latency, transfer)

    def _move(self, now: Number, transfer: Transfer) -> None:
        """Let the bytes of the current phase travel. `_share` sets their rate, if they use shared links."""
        phase, loads = transfer.phases[-1], transfer.loads[-1]
        transfer.moving = True
        transfer.limit = None if phase.bandwidth is None else exact(phase.bandwidth)
        transfer.remaining, transfer.rate, transfer.since = exact(phase.nbytes), 0, now
        if not loads or not phase.nbytes:
            self._at(
                now + (transfer.remaining / transfer.limit if transfer.limit is not None else 0), transfer
            )
            return
        for port in loads:
            self._on[port][transfer] = loads
            self._changed[port] = None

    def _end_phase(self, transfer: Transfer) -> None:
        """Remove the current phase of a transfer, also from the ports that it uses."""
        transfer.moving = False
        transfer.phases.pop()
        for port in transfer.loads.pop():
            if self._on[port].pop(transfer, None) is not None:
                self._changed[port] = None

    def _share(self, now: Number) -> None:
        """Compute the rates on changed ports, and on all ports that changed ports reach through transfers.
        Plan the end of each transfer whose rate changes."""
        ports, flows = list(self._changed), dict[Transfer, Loads]()
        seen = set(ports)
        for port in ports:  # the loop appends to `ports`
            for transfer, loads in self._on[port].items():
                if transfer not in flows:
                    flows[transfer] = loads
                    new = [other for other in loads if other not in seen]
                    seen.update(new)
                    ports += new
        self._changed.clear()
        for transfer, rate in progressive_filling(flows.items(), self._capacities).items():
            if rate != transfer.rate:
                transfer.remaining -= transfer.rate * (now - transfer.since)
                transfer.rate, transfer.since = rate, now
                self._at(now + max(transfer.remaining, 0) / rate, transfer)


def exact(number: Number) -> Number:
    """Return a float unchanged. Convert other numbers to fractions, whose quotients are exact."""
    return number if isinstance(number, float) else Fraction(number)
