"""Instructions of a plan.

Each operation has its own kinds; `plan.instructions` has the kinds that only a plan has.

A *slot* holds one bundle of tensors on one device. A slot is written once, unless it holds a running sum, so
its number identifies a value. An instruction empties a slot that it reads for the last time before it works
on the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.values import TensorSpec

Channel = tuple[int, int]  # (sending device, receiving device)
Group = tuple[tuple[int, ...], str]  # devices that communicate together, and the name of their communicator


def neighbors(members: tuple[int, ...], steps: int = 1) -> tuple[Channel, ...]:
    """Return the channels on which each member of a ring sends to the member that is `steps` further, such as
    `((0, 1), (1, 2), (2, 0))`. Return an empty tuple if this member is the sender itself."""
    far = steps % len(members)
    return tuple(zip(members, members[far:] + members[:far], strict=True)) if far else ()


def all_pairs(members: tuple[int, ...]) -> tuple[Channel, ...]:
    """Return the channels on which each member sends to each other member."""
    return tuple((a, b) for a in members for b in members if a != b)


@dataclass(frozen=True, slots=True)
class Read:
    """A read of one bundle by an instruction; `last` empties the slot.

    Printed as `s3`, or `s3!` for the last read.
    """

    slot: int
    last: bool = False

    def __str__(self) -> str:
        return f"s{self.slot}!" if self.last else f"s{self.slot}"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """An entry of a plan.

    Attributes:
        op: The operation, as texts, figures and recordings name it.
        color: The color in figures of a device's work; None for bookkeeping.
        paced: Whether the instruction begins only after the last chunk that was issued before it is done,
            even if its own stream could begin earlier. An earlier begin would only fill memory earlier.
        node: Id of the DAG node to which the instruction belongs.
        label: The node's label, which messages show.
        stream: The logical stream that runs the instruction.
        origin, placed_by: Indices of the directives that made and placed the node.
        reads: The bundles that the instruction reads, in order.
        writes: The slots that the instruction writes, in order; None for an output that is not read.
    """

    op: ClassVar[str]
    color: ClassVar[str | None] = None
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
        """The node and its directives, as messages show them."""
        made = "" if self.origin is None else f", made by directive {self.origin}"
        placed = "" if self.placed_by is None else f", placed by directive {self.placed_by}"
        return f"{self.op} %{self.node} {self.label}{made}{placed}"

    @property
    def row(self) -> str:
        """The row of figures that shows the instruction: the stream or communicator that does the work."""
        return self.stream

    @property
    def into(self) -> int:
        """The slot that the instruction writes, which must be its only one."""
        (slot,) = self.writes
        assert slot is not None
        return slot

    def __str__(self) -> str:
        words = [self.op, f"%{self.node}", *self.details()]
        if self.stream != "compute":
            words.append(f"stream={self.stream}")
        return " ".join(words)

    def details(self) -> list[str]:
        """Return the words of the text form after the operation and the node."""
        shown = ["(" + ", ".join(map(str, self.reads)) + ")"] if self.reads else []
        if self.writes:
            shown += ["->", ", ".join("_" if slot is None else f"s{slot}" for slot in self.writes)]
        return shown


@dataclass(frozen=True, kw_only=True)
class Collective(Instruction):
    """An instruction that starts a collective of all `members`, without waiting.

    The slot is pending until the node's `WaitWork`.

    Attributes:
        rings: Number of passes around a ring of n members. A pass has n - 1 steps, and in each step every
            member sends 1/n of the bytes to the next (Patarasuk and Yuan 2009). The simulator derives the
            cost from this number.
        direct: Whether every member sends all of the bytes to one other member, in one step.
        sums: Whether the collective sums a bucket of gradients over replicas, which only the last batch of a
            gradient accumulation needs.
        members: The devices, in the order of their parts.
        communicator: Name of the communicator, which has a stream of its own.
        bucket: The bucket whose flat tensor the members communicate; None if they communicate other values.
    """

    rings: ClassVar[int] = 1
    direct: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    color: ClassVar[str] = "#b4a7d6"

    members: tuple[int, ...]
    communicator: str
    bucket: Bucket | None = None

    @property
    def routes(self) -> tuple[Channel, ...]:
        """The messages that travel at the same time. A member divides its bytes evenly among its messages."""
        return neighbors(self.members)

    @property
    def group(self) -> Group:
        return (self.members, self.communicator)

    @property
    def row(self) -> str:
        return self.communicator

    @property
    def gathers(self) -> bool:
        """Whether every member gets the parts of all members, without a sum."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor that is summed or gathered, in the dtype of the messages. A kind of
        collective without a bucket overrides this property."""
        if self.bucket is None:
            raise AssertionError(f"{self.op} does not say its size")
        return self.bucket.whole.nbytes

    def details(self) -> list[str]:
        apart = [f"communicator={self.communicator}"] if self.communicator != self.stream else []
        return [*super().details(), "over", ",".join(map(str, self.members)), *apart]


@dataclass(frozen=True, kw_only=True)
class WaitWork(Instruction):
    """An instruction that waits for the node's `Irecv` or `Collective`. After the wait, the slot is
    readable."""

    op: ClassVar[str] = "wait"


@dataclass(frozen=True, kw_only=True)
class HostCopy(Instruction):
    """An instruction that copies a bundle between the device and its host, without waiting.

    Attributes:
        to_host: Whether the copy goes to the host. If not, it goes to the device.
        tensors: Specs of the tensors.
    """

    to_host: ClassVar[bool] = False

    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)
