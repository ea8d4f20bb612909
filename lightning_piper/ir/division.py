"""The tensors that a program shards along an axis of the mesh, and how it shards them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_piper.ir.values import Placement, Sharded


@dataclass(frozen=True)
class Change:
    """A change of a value's placement along an axis."""

    axis: str
    before: Placement
    after: Placement


@dataclass(frozen=True)
class Division:
    """The parameters and values that a program shards along an axis whose members work on the same samples.

    Attributes:
        axis: Name of the axis.
        degree: Number of members.
        params: Canonical name of a parameter -> how it is divided.
        values: Label of a region, or a pattern of labels -> how the values that the region outputs to other
            regions are divided.
        stream: Logical stream of the exchanges along the axis.
        attention: How attention over sharded sequences communicates: "keys" gathers the keys, "heads"
            exchanges sequence shards for heads, "ring" passes the keys around the members. None chooses
            between "keys" and "heads" by the communication volume.
    """

    axis: str
    degree: int
    params: Mapping[str, Sharded] = field(default_factory=dict)
    values: Mapping[str, Sharded] = field(default_factory=dict)
    stream: str = "alltoall"
    attention: str | None = None
