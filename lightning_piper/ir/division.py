"""What a program says of tensors that the members of an axis divide between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_piper.ir.values import Placement, Shard


@dataclass(frozen=True)
class Change:
    """A value gets another placement along an axis."""

    axis: str
    before: Placement
    after: Placement


@dataclass(frozen=True)
class Division:
    """Parameters, and values, that are divided along an axis whose members work on the same samples.

    Attributes:
        axis: its name.
        degree: its members.
        params: canonical name of a parameter -> how it is divided.
        values: label of a region, or a pattern of labels -> how what it hands to other regions is divided.
        stream: logical stream of the exchanges along the axis.
        attention: how an attention takes parts of sequences: "keys" (gathered), "heads" (exchanged for), "ring" (keys go round),
            None: one of the first two, what moves less.
    """

    axis: str
    degree: int
    params: Mapping[str, Shard] = field(default_factory=dict)
    values: Mapping[str, Shard] = field(default_factory=dict)
    stream: str = "alltoall"
    attention: str | None = None
