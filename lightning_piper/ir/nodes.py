"""The node types of the training DAG.

A node stands for the same work on every device of its group, so the DAG does not grow with the degree of data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Slice, Value

Ref = tuple[int, int]  # (node id, output index)


@dataclass(kw_only=True)
class Node:
    """Attributes:
    id: unique in its DAG, in order of creation; -1 until the DAG has taken the node.
    inputs: the values it reads.
    outputs: the values it makes.
    tags: what filters see.
    devices: the logical devices it runs on; empty while it is unplaced.
    stream: the logical stream it runs on.
    origin: index of the directive that made it; None for what the capture gave.
    placed_by: index of the directive that gave it its devices.
    """

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


@dataclass(kw_only=True)
class Chunk(Node):
    """One pass of one region for one slice of the batch.

    Attributes:
        region: index of the region.
        kind: the pass, `F`, `B`, or a half of B, `BI` or `BW`; filters see it as the tag `PASS`.
        slice: the samples it works on, counted in the share of its replica: replica r works on the same ones of its own share.
        state: where the current value of each buffer in `Interface.state` comes from; None is the module's own buffer, as
            it was before the step.
        params: the bucket that brings each parameter in `Interface.params`; None is the device's own copy of it. Empty: all are.
    """

    region: int
    kind: str
    slice: Slice
    state: tuple[Ref | None, ...] = ()
    params: tuple[Ref | None, ...] = ()

    @property
    def key(self) -> PassKey:
        return (self.region, self.kind)

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.inputs + tuple(ref for ref in self.state + self.params if ref is not None)

    @property
    def label(self) -> str:
        tags = ",".join(f"{k}={v}" for k, v in self.tags.items() if k != "PASS")
        return f"{self.kind}[{tags}]"


@dataclass(kw_only=True)
class Send(Node):
    """Hands a value to the channel from each of its devices to the peer at the same position."""

    peers: tuple[int, ...]


@dataclass(kw_only=True)
class Recv(Node):
    """Takes a value out of the channel from the peer at the same position. Its only input is the matching send's output."""

    peers: tuple[int, ...]


@dataclass(kw_only=True)
class AllReduce(Node):
    """Sums what the members of its group hold: inputs are `Partial`, the output is `Replicate`."""


@dataclass(kw_only=True)
class ReduceScatter(Node):
    """Sums a bucket over its group and leaves each member with its shard: the input is `Partial`, the output is `Shard`."""


@dataclass(kw_only=True)
class Parameters(Node):
    """The shards of a bucket of parameters, as the optimizer left them. Reads nothing, makes a `Shard`.

    Attributes:
        kept: every member has room for the whole bucket between steps, though only its own shard in it is up to date then.
    """

    kept: bool


@dataclass(kw_only=True)
class AllGather(Node):
    """Brings a bucket's shards together on every member of its group: the input is `Shard`, the output is `Replicate`."""


@dataclass(kw_only=True)
class AllToAll(Node):
    """Moves tokens between the devices that ask for experts and those that own them.

        counts     reads counts [E], makes [devices, experts here]: what each device sends here
        dispatch   rows to the owners of their experts: sorted by expert, and for each by the device that they come from
        combine    rows back to where they came from, in the order in which they left

    Reads the rows, and unless all experts have the same number of places, the counts at home and those that arrived.

    Attributes:
        way: `counts`, `dispatch` or `combine`.
        region: that has the experts.
        owners: groups of replicas that own all experts together, as in `Bucket.owners`.
    """

    way: str
    region: int
    owners: tuple[tuple[int, ...], ...]

    @property
    def label(self) -> str:
        return f"alltoall.{self.way}"


@dataclass(kw_only=True)
class Pack(Node):
    """Some tensors of a bundle, laid into the flat tensor of a bucket."""


@dataclass(kw_only=True)
class Cut(Node):
    """Samples `start:stop`, along `dim`, of a value: where a split region reads what an unsplit one made."""

    dim: int
    start: int
    stop: int


@dataclass(kw_only=True)
class Concat(Node):
    """Its inputs joined along `dim`: where an unsplit region reads what a split one made."""

    dim: int


@dataclass(kw_only=True)
class Accumulate(Node):
    """The sum of gradients of the same parameters from one region, over slices, added from the first input to the last."""


@dataclass(kw_only=True)
class Update(Node):
    """The sum of its inputs, one from each region that uses them, is ready: parameters for the optimizer, or (one input)
    the last value of buffers for the module."""


@dataclass(kw_only=True)
class Result(Node):
    """Some tensors of what a forward-only step returns, of the replica's share of the batch: ready on these devices."""


@dataclass(kw_only=True)
class Metrics(Node):
    """Merges the scalars of one region over slices into a float64 vector with a place for each metric of the step.

    Attributes:
        metrics: for each input, which metric it is, by its place in `ir.build.metric_names`.
        slices: for each input, the samples it is made of; its weight is their share of the batch, n_i/N.
    """

    metrics: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(kw_only=True)
class Report(Node):
    """Loss and logged values of the step, on every device: the sum of its inputs."""


@dataclass(kw_only=True)
class Barrier(Node):
    """Runs nothing: what is ordered after it waits for all that is ordered before it. Keeps an order between two groups of
    m and n nodes at m + n edges."""
