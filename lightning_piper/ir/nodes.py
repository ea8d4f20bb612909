"""What a node of the training DAG is, and the one that the graph is about: a chunk. Communication, sums and what else stands
between chunks are operations, one file a family in `lightning_piper.ops`.

A node stands for the same work on every device of its group, so the DAG does not grow with the degree of data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Slice, Value

Ref = tuple[int, int]  # (node id, output index)


class Turn(Enum):
    """When a node comes in the one order of the whole step, of those that could come next (`plan.order`)."""

    FIRST = "before everything else: it reads nothing"
    AHEAD = "some chunks before the one that reads it (`Node.ahead`): what it waits for is there long before"
    AT_ONCE = "before all others, what most chunks wait for first: communication that chunks wait for"
    WHEN_NEEDED = "at once if a chunk waits for it, else with the bookkeeping: sums over members"
    SOON = "before the next chunk: bookkeeping"
    IF_HERE = "before the next chunk, unless what it reads comes from another device"
    BY_PASS = "forward before backward, by samples: chunks"
    BEHIND_FORWARD = "after the forward passes that could run, before all other chunks: backward passes wait for it"
    LATE = "after the chunks that could run: nothing in the step needs it, and it may wait for another device"
    LAST = "when there is nothing else: the report"


@dataclass(frozen=True, kw_only=True)
class Node:
    """What the devices of a group do once in a step. A node is changed by its DAG alone (`TrainingDAG.change`, `rewire`), in
    place: who holds it sees it.

    Attributes:
    id: unique in its DAG, in order of creation; -1 until the DAG has taken the node.
    inputs: the values it reads.
    outputs: the values it makes.
    tags: what filters see.
    devices: the logical devices it runs on; empty while it is unplaced.
    stream: the logical stream it runs on.
    origin: index of the directive that made it; None for what the capture gave.
    placed_by: index of the directive that gave it its devices.

    What a kind of node is to the rest of the system:

    turn: when it comes in the global order.
    ahead: how many chunks before its first reader it is issued, where its turn is `AHEAD`.
    communicates: it moves data between devices.
    moves: it hands on what it reads, unchanged.
    sums: it sums what its members hold of a bucket, over replicas.
    reads_from: where what it reads lies: on its `own` devices, behind a `channel`, or on some of its `members`.
    everywhere: it runs on all devices of the step, replicas or not.
    shows_tags: behind its label, in texts.
    """

    turn: ClassVar[Turn] = Turn.SOON
    ahead: ClassVar[int] = 1
    communicates: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_from: ClassVar[str] = "own"
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
        """Every value the node reads, also those that are not positional inputs."""
        return self.inputs

    @property
    def label(self) -> str:
        return type(self).__name__.lower()

    @property
    def per_use(self) -> bool:
        """What it makes is brought anew for each chunk that reads it, and not kept for the next one."""
        return False

    @property
    def details(self) -> str:
        """What the text form shows behind the label; "" for nothing."""
        return ""

    def members(self, replica: int) -> tuple[int, ...]:
        """The devices with which a replica's device communicates here: those that share the bucket, or all of the node's."""
        bucket = self.outputs[0].bucket if self.outputs else None
        return self.devices if bucket is None else tuple(self.devices[place] for place in bucket.shard_group(replica))


@dataclass(frozen=True, kw_only=True)
class Chunk(Node):
    """One pass of one region for one slice of the batch.

    Attributes:
        region: index of the region.
        kind: the pass, `F`, `B`, or of a split B, `BI` or `BW`; filters see it as the tag `PASS`.
        slice: the samples it works on, counted in the local batch of its replica: replica r works on the same ones of its own.
        state: where the current value of each buffer in `Interface.state` comes from; None is the module's own buffer, as
            it was before the step.
        params: the bucket that brings each parameter in `Interface.params`; None is the device's own copy of it. Empty: all are.
        weights: what makes the gradient of each term in `Interface.seeds`; None: its weight does not follow from the batch. Empty:
            none does.
    """

    turn = Turn.BY_PASS
    shows_tags = False  # they are in its label

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
