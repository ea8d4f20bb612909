"""The instructions of a plan.

A *slot* holds one bundle of tensors on one device. Slots are written once (a running sum apart), so a slot's number names a
value. What an instruction reads for the last time leaves its slot before the instruction works on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Slice, TensorSpec

Channel = tuple[int, int]  # (sending device, receiving device)
Group = tuple[tuple[int, ...], str]  # devices that communicate together, on a logical stream: one communicator
Place = tuple[int, int]  # (index of a bundle in `reads`, tensor in the bundle)


@dataclass(frozen=True, slots=True)
class Read:
    """One bundle that an instruction reads; `last` empties the slot. Printed `s3`, or `s3!` when it is the last."""

    slot: int
    last: bool = False

    def __str__(self) -> str:
        return f"s{self.slot}!" if self.last else f"s{self.slot}"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Attributes:
    node: id of the DAG's node it belongs to.
    label: the node's label, for messages.
    stream: the logical stream it runs on.
    origin, placed_by: indices of the directives that made and placed the node.
    reads: bundles read, in order.
    writes: slots written, in order; None where nobody reads what is made.
    """

    op: ClassVar[str]

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
class Run(Instruction):
    """Run a chunk's code.

    Attributes:
        key: region and pass.
        slice: the samples.
        inputs: how many of `reads` are the chunk's inputs; further ones hold buffers that an earlier chunk changed, and
            parameters that were gathered.
        state: for each buffer in `Interface.state` the place of its value (index in `reads`, tensor in the bundle), or
            None for the module's own buffer.
        params: the same for each parameter in `Interface.params`; None for the device's own copy. Empty: all are.
        degrees: over how many devices experts are divided, as in `ir.regions.Step.at`, if this region's are.
    """

    op: ClassVar[str] = "run"
    key: PassKey
    slice: Slice
    inputs: int
    state: tuple[Place | None, ...] = ()
    params: tuple[Place | None, ...] = ()
    degrees: tuple[int, ...] = ()

    def details(self) -> list[str]:
        return [self.label, str(self.slice), *super().details()]


@dataclass(frozen=True, kw_only=True)
class Send(Instruction):
    """Hand a bundle to the channel; does not wait. `tensors` are the specs of what travels, one message each."""

    op: ClassVar[str] = "send"
    channel: Channel
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [*super().details(), "to", str(self.channel[1])]


@dataclass(frozen=True, kw_only=True)
class Retire(Instruction):
    """Let go of what was sent. Stands where the receiver is known to have it, or at the end of the step, where it waits."""

    op: ClassVar[str] = "retire"
    channel: Channel


@dataclass(frozen=True, kw_only=True)
class Post(Instruction):
    """Start to receive a bundle; does not wait. The slot is pending until `Wait`.

    Attributes:
        channel: where it comes from.
        message: node id of the send that it must meet.
        tensors: specs of the tensors.
    """

    op: ClassVar[str] = "post"
    channel: Channel
    message: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [*super().details(), "from", str(self.channel[0])]


@dataclass(frozen=True, kw_only=True)
class Wait(Instruction):
    """Wait for what a `Post` or a `Collective` of the same node started; the slot is readable afterwards."""

    op: ClassVar[str] = "wait"


@dataclass(frozen=True, kw_only=True)
class Collective(Instruction):
    """Start an operation of all `members`; does not wait. The slot is pending until `Wait`."""

    members: tuple[int, ...]

    @property
    def group(self) -> Group:
        return (self.members, self.stream)

    @property
    def meeting(self) -> tuple[int, tuple[int, ...]]:
        """The same for all members, and for them alone: at one node, several groups may do the same side by side."""
        return (self.node, self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole that is summed or gathered."""
        raise AssertionError(f"{self.op} does not say its size")

    def details(self) -> list[str]:
        return [*super().details(), "over", ",".join(map(str, self.members))]


@dataclass(frozen=True, kw_only=True)
class Reduce(Collective):
    """Add up the bundles read (zeros if there are none) and sum them over the members.

    Attributes:
        tensors: what is summed.
        bucket: one flat tensor is summed, in place: its maker made it for that.
    """

    op: ClassVar[str] = "reduce"
    tensors: tuple[TensorSpec, ...]
    bucket: Bucket | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Collective):
    """Sum a flat tensor over the members; each gets its shard of the sum."""

    op: ClassVar[str] = "reduce_scatter"
    bucket: Bucket

    @property
    def nbytes(self) -> int:
        return self.bucket.whole.nbytes


@dataclass(frozen=True, kw_only=True)
class AllGather(Collective):
    """Bring the members' shards of a bucket of parameters together; the slot gets the parameters.

    Attributes:
        kept: into the flat tensor that this device keeps between steps, and that has its own shard in place.
    """

    op: ClassVar[str] = "all_gather"
    bucket: Bucket
    kept: bool

    @property
    def nbytes(self) -> int:
        return self.bucket.whole.nbytes


@dataclass(frozen=True, kw_only=True)
class AllToAll(Collective):
    """Send rows to the owners of their experts, or back, or tell the owners how many will come; see `ir.nodes.AllToAll`.

    Attributes:
        way: `counts`, `dispatch` or `combine`.
        tensor: what is expected to arrive; the number of rows is open unless all experts have equally many places.
    """

    op: ClassVar[str] = "all_to_all"
    way: str
    tensor: TensorSpec

    @property
    def even(self) -> bool:
        """Does each member send, and get, equal parts? Then no counts are read."""
        return len(self.reads) == 1

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def details(self) -> list[str]:
        return [self.way, *super().details()]


@dataclass(frozen=True, kw_only=True)
class Pack(Instruction):
    """Lay tensors of a bundle into a new flat tensor. `take` are their indices in the bundle, in the order of the bucket."""

    op: ClassVar[str] = "pack"
    bucket: Bucket
    take: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cut(Instruction):
    """Samples `start:stop` along `dim`."""

    op: ClassVar[str] = "cut"
    dim: int
    start: int
    stop: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return [f"[{self.start}:{self.stop}]", "dim", str(self.dim), *super().details()]


@dataclass(frozen=True, kw_only=True)
class Concat(Instruction):
    """The bundles read joined along `dim`."""

    op: ClassVar[str] = "concat"
    dim: int
    tensors: tuple[TensorSpec, ...]

    def details(self) -> list[str]:
        return ["dim", str(self.dim), *super().details()]


@dataclass(frozen=True, kw_only=True)
class Add(Instruction):
    """One step of a sum. The first two terms are added into new tensors, for the first may be an alias of anything; from
    then on the sum (`in_place`, the only slot written more than once) belongs to nobody else and is added to in place.

    Attributes:
        in_place: the one bundle read is added to what the slot holds.
        bucket, take: the sum is a flat tensor, the terms are bundles as `Pack` reads them.
    """

    op: ClassVar[str] = "add"
    in_place: bool = False
    bucket: Bucket | None = None
    take: tuple[int, ...] = ()

    def details(self) -> list[str]:
        if self.in_place:
            return [f"s{self.writes[0]} += {self.reads[0]}"]
        return [f"s{self.writes[0]} = {self.reads[0]} + {self.reads[1]}"]


@dataclass(frozen=True, kw_only=True)
class Merge(Instruction):
    """Scalars over slices -> a float64 vector.

    Attributes:
        metrics: for each bundle read, its place in the vector.
        weights: for each bundle read, the share of the batch it is made of.
        reductions: for each metric, `mean`, `sum`, `max` or `min`.
        replica, replicas: the vector has a place for each metric for each replica in turn; all but this one's are 0.
    """

    op: ClassVar[str] = "merge"
    metrics: tuple[int, ...]
    weights: tuple[float, ...]
    reductions: tuple[str, ...]
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Deliver(Instruction):
    """Hand out gradients to the optimizer, new values of buffers to the module, or what a forward-only step returns.

    Attributes:
        kind: `grad`, `buffer` or `result`.
        names: of the parameters, buffers or results, one for each tensor.
        source: `sum` if the tensors are sums made here, which nothing else refers to; `chunk` if a chunk made them, so they
            may be aliases of each other or of what it read; `peer` if they were received.
        bucket: what is read is a flat tensor, or a shard of one.
        shard: index of the shard; None if it is whole.
    """

    op: ClassVar[str] = "deliver"
    kind: str
    names: tuple[str, ...]
    source: str
    bucket: Bucket | None = None
    shard: int | None = None

    def details(self) -> list[str]:
        return [*super().details(), "as", f"{self.kind}:" + ",".join(self.names)]


@dataclass(frozen=True, kw_only=True)
class Report(Instruction):
    """Hand out the sum of the metric vectors read, merged over the replicas by `reductions`."""

    op: ClassVar[str] = "report"
    reductions: tuple[str, ...] = ()
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Record(Instruction):
    """Mark this point of the stream. Only where another stream reads what was made up to here."""

    op: ClassVar[str] = "record"
    event: int

    def details(self) -> list[str]:
        return [f"e{self.event}"]


@dataclass(frozen=True, kw_only=True)
class Await(Instruction):
    """Let the stream wait for the event. `shared` are slots of another stream that this one reads next."""

    op: ClassVar[str] = "await"
    event: int
    shared: tuple[int, ...]

    def details(self) -> list[str]:
        return [f"e{self.event}", "for", ", ".join(f"s{slot}" for slot in self.shared)]
