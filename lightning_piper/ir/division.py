"""What a program says of tensors that the members of an axis divide between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_piper.ir.values import Shard


@dataclass(frozen=True)
class Division:
    """Parameters, and values, that are divided along an axis whose members work on the same samples.

    Attributes:
        axis: its name.
        degree: its members.
        params: canonical name of a parameter -> how it is divided.
        values: label of a region, or a pattern of labels -> the dimension along which what it hands to other regions is divided.
        attention: how an attention takes parts of sequences: "keys" (gathered), "heads" (exchanged for), None: what moves less.
    """

    axis: str
    degree: int
    params: Mapping[str, Shard] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    attention: str | None = None
