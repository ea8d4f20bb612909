"""What an instruction of a plan is. Each operation has its own kinds; those that only a plan has are in `plan.instructions`.

A *slot* holds one bundle of tensors on one device. Slots are written once (a running sum apart), so a slot's number names a
value. What an instruction reads for the last time leaves its slot before the instruction works on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.values import TensorSpec

Channel = tuple[int, int]  # (sending device, receiving device)
Group = tuple[tuple[int, ...], str]  # devices that communicate together, and the name of their communicator


@dataclass(frozen=True, slots=True)
class Read:
    """One bundle that an instruction reads; `last` empties the slot. Printed `s3`, or `s3!` when it is the last."""

    slot: int
    last: bool = False

    def __str__(self) -> str:
        return f"s{self.slot}!" if self.last else f"s{self.slot}"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One entry of a plan.

    Attributes:
        op: the operation, in texts, figures and recordings.
        colour: in pictures of what a device does; None for bookkeeping.
        paced: it begins no sooner than the chunk that was issued last is done, whatever its own stream could do: what it makes room
            for would lie there unused.
        node: id of the DAG's node it belongs to.
        label: the node's label, for messages.
        stream: the logical stream it runs on.
        origin, placed_by: indices of the directives that made and placed the node.
        reads: bundles read, in order.
        writes: slots written, in order; None where what is made is not read.
    """

    op: ClassVar[str]
    colour: ClassVar[str | None] = None
    paced: ClassVar[bool] = False

    node: int
    label: str
    stream: str = "compute"
    origin: int | None = None
    placed_by: int | None = None
    reads: tuple[Read, ...] = ()
    writes: tuple[int | None, ...] = ()

    @property
    def where(self) -> str:
        """The node and its directives, for messages."""
        made = "" if self.origin is None else f", made by directive {self.origin}"
        placed = "" if self.placed_by is None else f", placed by directive {self.placed_by}"
        return f"{self.op} %{self.node} {self.label}{made}{placed}"

    @property
    def row(self) -> str:
        """Where pictures show it: the stream or the communicator that does the work."""
        return self.stream

    @property
    def into(self) -> int:
        """The slot written, of an instruction that writes one."""
        (slot,) = self.writes
        assert slot is not None
        return slot

    def __str__(self) -> str:
        words = [self.op, f"%{self.node}", *self.details()]
        if self.stream != "compute":
            words.append(f"stream={self.stream}")
        return " ".join(words)

    def details(self) -> list[str]:
        """What the text form shows after the operation and the node."""
        shown = ["(" + ", ".join(map(str, self.reads)) + ")"] if self.reads else []
        if self.writes:
            shown += ["->", ", ".join("_" if slot is None else f"s{slot}" for slot in self.writes)]
        return shown


@dataclass(frozen=True, kw_only=True)
class Collective(Instruction):
    """Start an operation of all `members`; does not wait. The slot is pending until the `WaitWork` of the same node.

    Attributes:
        rings: how often a ring of n members goes round, each time in n - 1 steps, in which every member sends 1/n of the bytes to
            the next (Patarasuk and Yuan 2009): what the simulator knows of its cost.
        direct: every member sends all of the bytes to one other, in one step.
        sums: it sums a bucket of gradients over replicas, which can wait for the last batch of an accumulation.
        members: devices, in the order of what they bring.
        communicator: its name; it has a stream of its own.
        bucket: that is communicated, if it is one.
    """

    rings: ClassVar[int] = 1
    direct: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    colour: ClassVar[str] = "#b4a7d6"

    members: tuple[int, ...]
    communicator: str
    bucket: Bucket | None = None

    @property
    def group(self) -> Group:
        return (self.members, self.communicator)

    @property
    def row(self) -> str:
        return self.communicator

    @property
    def nbytes(self) -> int:
        """Bytes of the whole that is summed or gathered, as it travels."""
        if self.bucket is None:
            raise AssertionError(f"{self.op} does not say its size")
        return self.bucket.whole.nbytes

    def details(self) -> list[str]:
        apart = [f"communicator={self.communicator}"] if self.communicator != self.stream else []
        return [*super().details(), "over", ",".join(map(str, self.members)), *apart]


@dataclass(frozen=True, kw_only=True)
class WaitWork(Instruction):
    """Wait for what an `Irecv` or a `Collective` of the same node started; the slot is readable afterwards."""

    op: ClassVar[str] = "wait"


@dataclass(frozen=True, kw_only=True)
class HostCopy(Instruction):
    """Copy a bundle between the device and the memory of its host; does not wait.

    Attributes:
        to_host: what it makes lies there.
        tensors: specs of what is copied.
    """

    to_host: ClassVar[bool] = False

    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)
