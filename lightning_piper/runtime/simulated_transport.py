"""Plans of several devices on a simulated accelerator. Each device has its own streams and memory, and the
communicators work like NCCL's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.accelerators.communicators import Communicator, Member
from lightning_piper.accelerators.cooperative_threads import run_together
from lightning_piper.accelerators.simulated_device import Host, Simulated
from lightning_piper.plan.instructions import Channel, Group
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.collectives import Members
from lightning_piper.runtime.messages import Messages
from lightning_piper.runtime.process import ProcessEndpoint


class SimulatedTransport:
    """A transport that connects the plans of all devices in one process. The transport has the same class of
    endpoints as `ProcessTransport`, but simulated communicators.

    Attributes:
        hosts: The host of each logical device.
    """

    def __init__(self, simulated: Simulated, plans: Mapping[int, Plan]) -> None:
        self._simulated = simulated
        self.hosts = {
            device: Host(simulated, f"device {device}, ", simulated.queues) for device in sorted(plans)
        }
        # (channel or group, device) -> the device's side of the communicator
        self._members: dict[tuple[Channel | Group, int], Member] = {}
        self._shared: dict[Channel | Group, Communicator] = {}
        self.connect(plans)

    def connect(self, plans: Mapping[int, Plan]) -> None:
        """Add the communicators that these plans need and earlier plans did not need."""
        channels = sorted({c for plan in plans.values() for c in plan.channels})
        for channel in channels:
            self._join(channel, channel)
        for group in sorted({g for plan in plans.values() for g in plan.groups}):
            self._join(group, group[0])

    def _join(self, key: Any, members: Sequence[int]) -> None:
        """Create the communicator of a channel or group, with a stream on each member."""
        if key in self._shared:
            return
        ranks = sorted(members)
        order = [ranks.index(device) for device in members]
        shared = self._shared[key] = Communicator(f"communicator {key}", len(members), order)
        for device in members:
            stream = self.hosts[device].for_communicator()
            self._members[key, device] = Member(self._simulated, shared, ranks.index(device), stream)

    def endpoint(self, plan: Plan, device: torch.device) -> ProcessEndpoint:
        return ProcessEndpoint(_Side(self, plan.device), device)

    def member(self, key: Channel | Group, device: int) -> Member:
        return self._members[key, device]

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Return a context in which operations are issued to this device."""
        before, self._simulated.host = self._simulated.host, self.hosts[device]
        try:
            yield
        finally:
            self._simulated.host = before

    def run(self, programs: Mapping[int, Callable[[], Any]]) -> list[Any]:
        """Run a program on each device. Returns the results of the programs, by ascending device.

        Args:
            programs: Device -> the function that runs on it.
        """
        devices = sorted(programs)
        return run_together(self._simulated, [self.hosts[d] for d in devices], [programs[d] for d in devices])


class _Side:
    """The communicators of a `SimulatedTransport`, as one device sees them (`process.Communicators`)."""

    def __init__(self, transport: SimulatedTransport, device: int) -> None:
        self._transport, self._device = transport, device

    def members(self, key: Group) -> Members:
        """Return the members of a group, seen from this device."""
        ranks = sorted(key[0])
        member: Any = self._transport.member(key, self._device)
        return Members(
            Messages(member),
            [ranks.index(device) for device in key[0]],
            ranks.index(self._device),
            native=True,
        )

    def channel(self, channel: Channel, end: int) -> tuple[Messages, int]:
        member: Any = self._transport.member(channel, self._device)
        return Messages(member), sorted(channel).index(channel[end])


def samples_of(plan: Plan, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local batch of a plan's replica: views of the global batch `leaves`. A tensor without
    dimensions is the same in all local batches."""
    first = plan.replica * plan.local_batch_size
    return (
        list(leaves)
        if plan.replicas == 1
        else [x.narrow(0, first, plan.local_batch_size) if x.ndim else x for x in leaves]
    )
