"""`Plan`: what one device does in one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Channel, Group, Instruction


@dataclass(frozen=True)
class Plan:
    """The instructions of one device for one step, and what it takes to run them.

    Attributes:
        device: the logical device.
        devices: all logical devices of the step.
        size: samples in the global batch of one step.
        place: of the device in its groups: which shards it has, and whom it communicates with.
        replica, replicas: which local batch is this device's (0 where it works on none), and how many there are.
        slots: number of value slots.
        events: number of events between streams.
        channels: the directed channels it sends or receives on, sorted.
        groups: the device groups it communicates in, each on one stream, sorted.
        shards: the buckets of parameters of which it has one shard, and whether it keeps room for the whole of each.
        instructions: in the order in which they are issued.
        sync_only: nodes whose instructions only the last batch of a gradient accumulation needs: sums of gradients over replicas.
    """

    device: int
    devices: tuple[int, ...]
    size: int
    place: int
    replica: int
    replicas: int
    slots: int
    events: int
    channels: tuple[Channel, ...]
    groups: tuple[Group, ...]
    shards: Mapping[Bucket, bool]
    instructions: tuple[Instruction, ...]
    sync_only: frozenset[int] = frozenset()

    @property
    def local_batch_size(self) -> int:
        """Samples of the batch that this device works on."""
        return self.size // self.replicas

    @property
    def streams(self) -> tuple[str, ...]:
        """Logical streams that issue, sorted."""
        return tuple(sorted({i.stream for i in self.instructions}))

    @property
    def rows(self) -> tuple[str, ...]:
        """What goes on by itself, sorted: streams, and communicators."""
        return tuple(sorted({i.row for i in self.instructions} | set(self.streams)))

    def __str__(self) -> str:
        """One line an instruction: operation, node, what it reads (`!` for the last time) and writes."""
        head = f"device {self.device} of {','.join(map(str, self.devices))}, {self.size} samples, {self.slots} slots"
        if self.channels:
            head += ", channels " + " ".join(f"{a}>{b}" for a, b in self.channels)
        return "\n".join([head, *map(str, self.instructions)])
