"""The nodes of the training DAG, and its main node kind, the chunk.

`lightning_piper.ops` has the other kinds, such as communication and sums, one file for each family.

A node stands for the same work on every device of its group, so the DAG does not grow with the degree of data
parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Slice, Value

Ref = tuple[int, int]  # (node id, output index)


class IssuePriority(Enum):
    """A node's priority among the nodes that could come next in the global order (`plan.order`)."""

    FIRST = "before everything else: it reads nothing"
    PREFETCH = (
        "some chunks before the one that reads it (`Node.ahead`): what it waits for is there long before"
    )
    CRITICAL_COMM = (
        "before all others, the longest chain of chunks after it first: communication that chunks wait for"
    )
    ON_DEMAND = "at once if a chunk waits for it, else with the bookkeeping: sums over members"
    BOOKKEEPING = "before the next chunk: bookkeeping"
    LOCAL_BOOKKEEPING = "before the next chunk, unless what it reads comes from another device"
    COMPUTE = "forward before backward, by samples: chunks"
    AFTER_FORWARD = (
        "after the forward passes that could run, before all other chunks: backward passes wait for it"
    )
    DELAYED = (
        "some chunks of its devices later than it could come (`Node.delay`): what it reads arrives meanwhile"
    )
    DEFERRED = (
        "after the chunks that could run: nothing in the step needs it, and it may wait for another device"
    )
    LAST = "when there is nothing else: the report"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A piece of work that the devices of a group do once in a step.

    Only its DAG changes a node (`TrainingDAG.change`, `rewire`). It changes the node in place, so all
    references see the change.

    Attributes:
        id: A number that is unique in the DAG, in order of creation; -1 before the node is in a DAG.
        inputs: The values that the node reads.
        outputs: The values that the node makes.
        tags: The tags that filters match.
        devices: The logical devices that run the node; empty before a directive places it.
        stream: The logical stream that runs the node.
        origin: Index of the directive that made the node; None for a node of the capture.
        placed_by: Index of the directive that gave the node its devices.
        turn: The priority in the global order (a property of the node kind, like all attributes below).
        ahead: For `IssuePriority.PREFETCH`, how many chunks before its first reader the node is issued.
        delay: For `IssuePriority.DELAYED`, how many chunks of its devices come before the node after it is ready.
        communicates: Whether the node moves data between devices.
        moves: Whether the node outputs its inputs unchanged.
        sums: Whether the node sums the members' values of a bucket over replicas.
        reads_from: Where the inputs are: on the node's `own` devices, at the other end of a `channel`, or on
            some of its `members`.
        placed_by_reader: Whether the node runs on the devices of the chunk that reads its output, because it
            prepares a value for this chunk. If false, or if no chunk reads the output, the node runs on the
            devices of the values that it reads. Only a node that has no devices before a `place` uses this.
        everywhere: Whether the node's devices need not be a device group of a region. The report and its sum
            run on all devices of the step. A `Barrier` runs nothing.
        shows_tags: Whether texts show the tags after the label.
    """

    turn: ClassVar[IssuePriority] = IssuePriority.BOOKKEEPING
    ahead: ClassVar[int] = 1
    delay: ClassVar[int] = 1
    communicates: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_from: ClassVar[str] = "own"
    placed_by_reader: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False
    shows_tags: ClassVar[bool] = True

    id: int = -1
    inputs: tuple[Ref, ...] = ()
    outputs: tuple[Value, ...] = ()
    tags: Mapping[str, int | str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    stream: str = "compute"
    origin: int | None = None
    placed_by: int | None = None

    @property
    def reads(self) -> tuple[Ref, ...]:
        """All values that the node reads. Some kinds of nodes read further values besides `inputs`."""
        return self.inputs

    @property
    def label(self) -> str:
        return type(self).__name__.lower()

    @property
    def per_use(self) -> bool:
        """Whether Piper makes the output again for each chunk that reads it, instead of keeping it."""
        return False

    @property
    def details(self) -> str:
        """The text that follows the label in the text form; "" if nothing follows."""
        return ""

    def members(self, replica: int) -> tuple[int, ...]:
        """Return the devices that communicate with each other in this node, with group rank `replica` among
        them, in the order of their shards.

        They are the devices that divide the bucket of the first output with this rank. If that output is not
        in a bucket, or if the node has no outputs, they are all devices of the node.
        """
        bucket = self.outputs[0].bucket if self.outputs else None
        return (
            self.devices
            if bucket is None
            else tuple(map(self.devices.__getitem__, bucket.shard_group(replica)))
        )


@dataclass(frozen=True, kw_only=True)
class Chunk(Node):
    """A pass of one region for one slice of the batch.

    Attributes:
        region: Index of the region.
        kind: The pass: `F`, `B`, or one pass of a split B, `BI` or `BW`. Filters see it as the tag `PASS`.
        slice: The samples of the chunk, as positions in the replica's local batch. All replicas use the same
            positions.
        state: The source of the current value of each buffer in `Interface.state`; None is the module's own
            buffer, with its value before the step.
        params: The bucket that provides each parameter in `Interface.params`; None is the device's own copy.
            Empty: every parameter is the device's own copy.
        weights: The source of the gradient of each term in `Interface.seeds`; None if the term's weight does
            not follow from the batch. Empty: no weight follows from the batch.
    """

    turn = IssuePriority.COMPUTE
    shows_tags = False  # because the label contains the tags

    region: int
    kind: str
    slice: Slice
    state: tuple[Ref | None, ...] = ()
    params: tuple[Ref | None, ...] = ()
    weights: tuple[Ref | None, ...] = ()

    @property
    def key(self) -> PassKey:
        return (self.region, self.kind)

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.inputs + tuple(ref for ref in self.state + self.params + self.weights if ref is not None)

    @property
    def label(self) -> str:
        tags = ",".join(f"{k}={v}" for k, v in self.tags.items() if k != "PASS")
        return f"{self.tags.get('PASS', self.kind)}[{tags}]"

    @property
    def details(self) -> str:
        return str(self.slice)
