"""The transport with one process for each device, through `torch.distributed` (gloo on CPU, NCCL on CUDA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_piper.accelerators.kinds import HOST, backend_of, options_of
from lightning_piper.errors import ExecutionError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ops.base import Bound, Exchange, Slots
from lightning_piper.plan.instructions import (
    Channel,
    Collective,
    Group,
    Irecv,
    SendInstruction,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.collectives import Finish, Members, bind_collective, bind_single_member
from lightning_piper.runtime.groups import local_group
from lightning_piper.runtime.messages import Messages, PendingWork
from lightning_piper.runtime.piggyback import Piggyback, only_sums, piggyback_of
from lightning_piper.runtime.same_machine.shared_blocks import shared_blocks
from lightning_piper.runtime.same_machine.shared_memory import DIRECT, SharedMessages, messages_of
from lightning_piper.runtime.wire import packer, unpacker


class Communicators(Protocol):
    """The communicators of one device, as its endpoint needs them. `ProcessTransport` has real ones, and
    `simulated_transport` has simulated ones."""

    def members(self, key: Group) -> Members:
        """Return the members of a group, with this device as `own`."""
        ...

    def channel(self, channel: Channel, end: int) -> tuple[Messages, int]:
        """Return the messages of a channel, and a rank in its communicator: the rank of the sender (`end` 0)
        or of the receiver (`end` 1).
        """
        ...


def in_order(plan: Plan) -> list[Channel | Group]:
    """Return the communicators of a device in the order in which the device connects them.

    Any two devices connect their common communicators in the same order, so they cannot wait for each other.
    The order lets communicators without a common device connect at the same time. Channels between i and j
    are sorted by i xor j, because different pairs with the same xor do not share a device. The neighbors in
    a pipeline of n stages have about log n different values of i xor j. Groups are sorted by stream, because
    the groups on one stream rarely share devices.
    """
    channels = sorted(plan.channels, key=lambda channel: (channel[0] ^ channel[1], channel))
    return [*channels, *sorted(plan.groups, key=lambda group: (group[1], group[0]))]


class ProcessTransport:
    """A transport that owns the communicators of one process.

    Each directed channel has a communicator, so that no order of sends can block another channel. Each group
    has a communicator for each stream on which it communicates. The constructor is collective over the
    devices of the plans. A process makes only the communicators that it belongs to, and keeps them for later
    plans.

    Args:
        plans: The plans of the devices. The transport uses the plan of this process.
        ranks: The global rank of each logical device.
        device: The device of this process, which decides the backend (`kinds.backend_of`).
        timeout: The time after which an unanswered operation fails (default: torch's).

    Raises:
        ExecutionError: Two logical devices have the same rank.
    """

    def __init__(
        self,
        plans: Mapping[int, Plan],
        ranks: Sequence[int] | Mapping[int, int],
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self._ranks = dict(ranks) if isinstance(ranks, Mapping) else dict(enumerate(ranks))
        if len(set(self._ranks.values())) < len(self._ranks):
            raise ExecutionError(
                f"ProcessTransport: ranks={self._ranks}, so two devices have the same rank. Give each "
                "logical device its own rank [PIPER-X001]"
            )
        self._own = {rank: device for device, rank in self._ranks.items()}.get(dist.get_rank())
        self._device, self._timeout = device, timeout
        self._groups: dict[Group, Messages] = {}  # (members, stream) -> messages between the members
        self._channels: dict[Channel, Messages] = {}  # (sender, receiver) -> messages from one to the other
        self._all: Members | None = None  # the members of an exchange between two steps
        self.connect(plans)

    def connect(self, plans: Mapping[int, Plan]) -> None:
        """Create the communicators that this process's plan needs and that earlier plans did not need. Do
        nothing if this process has no logical device, or `plans` does not have it. Collective over the
        devices of the plans.

        Each new communicator carries one message now, because NCCL connects at the first message. In a step,
        the process would wait there for the other members, and one of these may wait for this process.
        """
        if self._own is None or self._own not in plans:
            return
        for key in in_order(plans[self._own]):
            if isinstance(key[0], tuple):
                self._connect_group(key)
            else:
                self._connect_channel(key)

    def _connect_channel(self, channel: Channel) -> None:
        """Connect the two ends of a channel by a first message."""
        if channel in self._channels:
            return
        messages = self._channels[channel] = self._new_messages(channel, f"channel {channel[0]}>{channel[1]}")
        sending = self._own == channel[0]
        peer = dist.get_group_rank(messages.group, self._ranks[channel[1 if sending else 0]])
        first = torch.zeros(1, dtype=torch.float32, device=self._device)
        for work in messages.send(first, [peer]) if sending else [messages.receive(first, peer)]:
            work.wait()

    def _connect_group(self, key: Group) -> None:
        if key not in self._groups:
            messages = self._groups[key] = self._new_messages(key[0], f"stream {key[1]}")
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._device), group=messages.group)

    def _new_messages(self, members: Sequence[int], purpose: str) -> Messages:
        backend = backend_of(self._device)
        group = local_group(
            [self._ranks[d] for d in members], purpose, backend, self._timeout, options_of(backend)
        )
        return messages_of(group, self._timeout) if backend == HOST else Messages(group)

    def close(self) -> None:
        """Destroy the communicators. Collective over the devices that share them."""
        for messages in [*self._channels.values(), *self._groups.values()]:
            messages.close()
        self._channels, self._groups, self._all = {}, {}, None

    def endpoint(self, plan: Plan, device: torch.device) -> ProcessEndpoint:
        missing: list[object] = [c for c in plan.channels if c not in self._channels]
        missing += [g for g in plan.groups if g not in self._groups]
        if missing:
            raise ExecutionError(
                f"device {plan.device}: {missing[0]} is not connected. Call connect with the plans on every "
                "rank [PIPER-X001]"
            )
        return ProcessEndpoint(self, device, piggyback_of(plan, device), only_sums(plan))

    def members(self, key: Group) -> Members:
        messages = self._groups[key]
        ranks = [dist.get_group_rank(messages.group, self._ranks[device]) for device in key[0]]
        return Members(
            messages, ranks, dist.get_rank(messages.group), dist.get_backend(messages.group) != HOST
        )

    def _between_steps(self) -> Members:
        """Return all devices as members. The first call makes a communicator, and is collective."""
        if self._all is None:
            key = tuple(sorted(self._ranks)), "between steps"
            self._connect_group(key)
            self._all = self.members(key)
        return self._all

    def any(self, flag: bool) -> bool:
        """Return whether any device's process passes True, between two steps. Waits for all of them, so that no process
        communicates further while another has left the loop. Collective.

        Raises:
            ExecutionError: The exchange failed.
        """
        try:
            messages = self._between_steps().messages
            if isinstance(messages, SharedMessages):
                return messages.any(flag)
        except RuntimeError as error:
            raise self._failed(error) from error
        return bool(self.sum(torch.tensor([int(flag)])))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over all devices, between two steps. The sum may use the
        memory of `x`. The first call makes a communicator. Collective.

        Raises:
            ExecutionError: The exchange failed.
        """
        try:
            members = self._between_steps()
            if isinstance(members.messages, SharedMessages):  # few processes on one machine
                work, total = members.add_up(x)
                work.wait()
                return total
            dist.all_reduce(x, group=members.group)
        except RuntimeError as error:
            raise self._failed(error) from error
        return x

    def _failed(self, error: RuntimeError) -> ExecutionError:
        """Return the error of an exchange between two steps."""
        return ExecutionError(
            f"device {self._own}: the exchange of all devices between two steps failed: {error}. Look for the "
            "first error in the logs of the other processes [PIPER-X001]"
        )

    def channel(self, channel: Channel, end: int) -> tuple[Messages, int]:
        """Return the messages of a channel, and a rank in its communicator: the rank of the sender (`end` 0)
        or of the receiver (`end` 1).
        """
        messages = self._channels[channel]
        return messages, dist.get_group_rank(messages.group, self._ranks[channel[end]])


MOST = 2**28  # maximum bytes of gradients per step that are summed through shared memory


class ProcessEndpoint:
    """The endpoint of one process (see `transport.RidingEndpoint`).

    While a value is pending, its slot holds a pair: the works (`PendingWork`), and the tensors that the works
    fill. `wait` replaces the pair with the value.

    Attributes:
        piggyback: The metrics and digests that travel in the messages of gradients; None if the plan does
            not allow it.

    Args:
        wait_alike: See `Members`.
    """

    hands_over = False

    def __init__(
        self,
        transport: Communicators,
        device: torch.device,
        piggyback: Piggyback | None = None,
        wait_alike: bool = False,
    ) -> None:
        self._transport, self._device, self.piggyback = transport, device, piggyback
        self._wait_alike = wait_alike
        # node of a send -> (works, packed message, sent value) for each tensor
        self._sent: dict[int, list[tuple[list[PendingWork], torch.Tensor, torch.Tensor]]] = {}
        # node of a collective -> function that makes its value when its works are done
        self._finish: dict[int, Finish] = {}
        self._members: dict[int, Members] = {}  # node of a collective -> its members
        self._summed = 0  # bytes of a step's sums that go through shared memory
        # Buckets of gradients that other processes read where they are packed.
        self._read_in_place: set[Bucket] = set()

    def flat(self, bucket: Bucket) -> torch.Tensor:
        numel = bucket.numel if self.piggyback is None else self.piggyback.room(bucket)
        if bucket in self._read_in_place:
            flat = shared_blocks().empty(numel, bucket.dtype)
        else:
            flat = torch.empty(numel, dtype=bucket.dtype, device=self._device)
        return bucket.without_gaps(flat[: bucket.numel])

    def reset(self) -> None:
        for sent in self._sent.values():
            sent.clear()

    def send(self, instruction: SendInstruction, slots: Slots) -> Bound:
        """Return the function that starts to send each tensor of the bundle that is not empty."""
        messages, peer = self._transport.channel(instruction.channel, 1)
        (read,) = instruction.reads
        source, last = read.slot, read.last
        packers = [packer(spec, self._device) for spec in instruction.tensors]
        filled = [spec.numel > 0 for spec in instruction.tensors]
        sent = self._sent[instruction.node] = []
        to = [peer]

        def send() -> None:
            bundle = slots[source]
            if last:
                slots[source] = None
            for x, pack, full in zip(bundle, packers, filled, strict=True):
                if full:
                    message = pack(x)
                    # Keep the value until `wait_send`, because on an accelerator the copy may not have read it
                    # yet.
                    sent.append((messages.send(message, to), message, x))

        return send

    def wait_send(self, instruction: WaitSend) -> Bound:
        """Return the function that waits until the transport no longer reads the sent tensors, and then drops
        the references to these tensors."""
        sent = self._sent[instruction.node]

        def wait_send() -> None:
            for works, *_ in sent:
                for work in works:
                    work.wait()
            sent.clear()

        return wait_send

    def irecv(self, instruction: Irecv, slots: Slots) -> Bound:
        """Return the function that allocates the received tensors and starts to receive them."""
        messages, peer = self._transport.channel(instruction.channel, 0)
        into = instruction.into
        rooms = [(unpacker(spec, self._device), spec.numel > 0) for spec in instruction.tensors]

        def irecv() -> None:
            works, values = [], []
            for room, full in rooms:
                message, value = room()
                if full:
                    works.append(messages.receive(message, peer))
                values.append(value)
            slots[into] = (works, tuple(values))

        return irecv

    def collective(self, instruction: Collective, exchange: Exchange, slots: Slots) -> Bound:
        """Return the function that starts a collective. If the received tensors are not yet its value, also
        store the function that makes the value from these tensors: `wait` calls it."""
        if len(instruction.members) == 1:  # nothing to exchange
            return bind_single_member(exchange, instruction.into, slots)
        members, piggyback = self._members_of(instruction, exchange), self.piggyback
        start, finish = bind_collective(exchange, instruction.into, slots, members)
        if piggyback is not None and instruction.node == piggyback.gradients_node:
            start = piggyback.bind_gradients(exchange, instruction.into, slots, members)
            finish = piggyback.finish_gradients
        elif piggyback is not None and instruction.node == piggyback.metrics_node:
            start = piggyback.bind_metrics(exchange, instruction.into, slots, start)
            finish = piggyback.finish_metrics
        if finish is not None:
            self._finish[instruction.node] = finish
        return start

    def _members_of(self, instruction: Collective, exchange: Exchange) -> Members:
        """Return the members of a collective, and store them for `vote_abort`.

        Also count the bytes of the plan's sums so far, because all of them may be running at once. As long as
        the count is at most `MOST`, buckets of gradients are packed into shared memory, where the other
        members read them. After that, the backend carries the all-reduces.
        """
        members, bucket = self._transport.members(instruction.group), instruction.bucket
        members.wait_alike = self._wait_alike
        if exchange.kind == "all_reduce" or instruction.sums:
            self._summed += instruction.nbytes
            if self._summed > MOST:
                members = members.without_memory() if exchange.kind == "all_reduce" else members
            elif (
                bucket is not None
                and isinstance(members.messages, SharedMessages)
                and instruction.nbytes > DIRECT
            ):
                self._read_in_place.add(bucket)
        self._members[instruction.node] = members
        return members

    def vote_abort(self) -> None:
        """Take part, with zeros, in the sums of a step that this process cannot run.

        So no process waits for these sums, and the step is void for all processes. The plan must have a
        `Piggyback`.
        """
        assert self.piggyback is not None
        self.piggyback.vote_abort(lambda each: self._members[each.node])

    def wait(self, instruction: WaitWork, slots: Slots) -> Bound:
        """Return the function that waits for the works in a slot, and puts the value into the slot."""
        into, finish = instruction.into, self._finish.get(instruction.node)

        def wait() -> None:
            works, values = slots[into]
            for work in works:
                work.wait()
            slots[into] = values

        def wait_and_finish() -> None:
            works, values = slots[into]
            for work in works:
                work.wait()
            slots[into] = finish(values)  # type: ignore[misc]

        return wait if finish is None else wait_and_finish
