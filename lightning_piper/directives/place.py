"""`place`: which device, and which logical stream, runs a part of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.directives.transfers import connect, connect_report, place_dependents
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter
from lightning_piper.ir.nodes import Chunk


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Directive):
    """Run the chunks that `filter` selects on `devices`; where data crosses devices, insert a send and a receive.

        F[PP=0] @?  ->  F[PP=1] @1      --place {PP: 0} on [0]-->      F[PP=0] @0 -> send @0 -> recv @1 -> F[PP=1] @1

    Attributes:
        filter: selects chunks by tags.
        devices: indices of logical devices.
        stream: logical stream that the chunks run on.

    The bits do not change: a transfer is the identity.
    """

    op: ClassVar[str] = "place"
    contract: ClassVar[Contract] = "bitwise"

    filter: Filter
    devices: Sequence[int]
    stream: str = "compute"

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        self.check_device_list("devices", self.devices)
        if len(self.devices) > 1:
            self.refuse(
                "devices",
                f"{list(self.devices)} are several devices",
                "a chunk runs on one device: name one, such as [0]",
            )
        if not isinstance(self.stream, str) or not self.stream:
            self.refuse("stream", f"{self.stream!r} is not a stream", "give a non-empty name such as 'compute'")

    def apply(self, dag: TrainingDAG) -> None:
        chunks = self.select(dag, "filter", self.filter)
        for chunk in chunks:
            if chunk.devices:
                self.refuse(
                    "filter",
                    f"{chunk.label} is already on device {chunk.devices[0]} (directive {chunk.placed_by})",
                    "place each chunk once",
                )
            chunk.devices, chunk.stream, chunk.placed_by = tuple(self.devices), self.stream, dag.origin
        self._together(dag, chunks)
        touched = [*chunks, *place_dependents(dag, chunks)]
        connect(dag, touched + [user for node in touched for user in dag.users(node)])
        connect_report(dag)

    def _together(self, dag: TrainingDAG, chunks: list[Chunk]) -> None:
        """A region's passes over one slice share a device, for they share its parameters."""
        for chunk in chunks:
            for other in [*dag.users(chunk), *(dag.nodes[ref[0]] for ref in chunk.reads)]:
                if isinstance(other, Chunk) and other.region == chunk.region and other.devices not in ((), chunk.devices):
                    self.refuse(
                        "devices",
                        f"{chunk.label} would be on device {chunk.devices[0]}, {other.label} is on {other.devices[0]}",
                        "a region keeps its parameters on one device: give all of its passes and slices the same",
                    )
