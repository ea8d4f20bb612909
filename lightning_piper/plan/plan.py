"""`Plan`: the work of one device in one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Channel, Group, Instruction


@dataclass(frozen=True, repr=False)
class Plan:
    """A list of one device's instructions for one step, and the facts that are needed to run them.

    Attributes:
        device: The logical device.
        devices: All logical devices of the step.
        size: Samples in the global batch of one step.
        group_rank: The position of the device in its groups. It selects the device's shards and communication
            partners.
        replica, replicas: Index of the replica whose local batch this device has (0 if it has none), and the
            number of replicas.
        slots: Number of value slots.
        events: Number of events between streams.
        channels: The directed channels on which the device sends or receives, sorted.
        groups: The device groups in which the device communicates, each with its communicator, sorted.
        shards: Each bucket of parameters with a shard on the device -> whether the device keeps the whole
            bucket's memory.
        instructions: The instructions in the order of issue.
        sync_only: Nodes whose instructions only the last batch of a gradient accumulation runs: sums of
            gradients over replicas and their readers, and early updates.
    """

    device: int
    devices: tuple[int, ...]
    size: int
    group_rank: int
    replica: int
    replicas: int
    slots: int
    events: int
    channels: tuple[Channel, ...]
    groups: tuple[Group, ...]
    shards: Mapping[Bucket, bool]
    instructions: tuple[Instruction, ...]
    sync_only: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"<Plan of device {self.device}: {len(self.instructions)} instructions, {self.size} samples>"

    @property
    def local_batch_size(self) -> int:
        """The number of samples in the local batch of one replica."""
        return self.size // self.replicas

    @property
    def streams(self) -> tuple[str, ...]:
        """The logical streams that issue instructions, sorted."""
        return tuple(sorted({i.stream for i in self.instructions}))

    @property
    def rows(self) -> tuple[str, ...]:
        """The streams and communicators, which run independently of each other, sorted."""
        return tuple(sorted({i.row for i in self.instructions} | set(self.streams)))

    def __str__(self) -> str:
        """Return a line for each instruction: operation, node, slots read (`!`: last read), slots written."""
        head = (
            f"device {self.device} of {','.join(map(str, self.devices))}, {self.size} samples, {self.slots} "
            "slots"
        )
        if self.channels:
            head += ", channels " + " ".join(f"{a}>{b}" for a, b in self.channels)
        return "\n".join([head, *map(str, self.instructions)])
