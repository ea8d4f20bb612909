"""The base of the directives that shard experts, weights and sequences: their axis, and the devices along it."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_piper.common.limits import NAME, is_name, shown
from lightning_piper.directives.base import Contract, Directive
from lightning_piper.directives.place import Place, example_of, groups_of
from lightning_piper.directives.rewrites.unplaced_regions import without_device
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter
from lightning_piper.ir.mesh import DATA, GROUPS, Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.host import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding(Directive):
    """A directive that shards tensors, or experts, over the devices along an axis.

    Attributes:
        filter: Selects chunks.
        devices: One group, `[0, 1]`, or a list of groups, `[[0, 1], [2, 3]]`. None: the lines along `axis` of the
            mesh on which chunks are placed. Without a mesh, the groups on which the program places chunks.
        axis: The name of the axis.
        stream: The logical stream of the communication along the axis.
    """

    contract: ClassVar[Contract] = "reassociated"

    filter: Filter = dataclasses.field(default_factory=dict)
    devices: Sequence[int] | Sequence[Sequence[int]] | None = None
    axis: str
    stream: str

    @abstractmethod
    def dividing_axes(self, dag: TrainingDAG) -> tuple[str, ...]:
        """Return the axes of a chunk's mesh along which this directive, and others that it works with, divide."""

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        self.check_stream("stream", "tp")
        if not is_name(self.axis) or self.axis in (DATA, GROUPS):
            self.refuse(
                "axis",
                f"{shown(self.axis)} is not the name of an axis that shards tensors",
                f"give a name of 1 to {NAME} printable characters other than {DATA!r} and {GROUPS!r}, such as 'tp' "
                "[PIPER-D003]",
            )
        if self.devices is None:
            return
        self.check_groups("devices", self.devices)
        sizes = sorted({len(group) for group in self.groups()})
        if len(sizes) > 1 or sizes[0] < 2:
            self.refuse(
                "devices",
                f"the groups have {' and '.join(map(str, sizes))} {'device' if sizes == [1] else 'devices'}",
                "give groups of one size, of at least two devices, and place the chunks on them [PIPER-D005]",
            )
        counts = Counter(device for group in self.groups() for device in group)
        twice, times = counts.most_common(1)[0]
        if times > 1:
            self.refuse(
                "devices",
                f"device {twice} is in {times} groups",
                "give groups that share no device, and place the chunks on them [PIPER-D005]",
            )

    def check_not_offloaded(self, dag: TrainingDAG) -> None:
        """Raise an error if an earlier directive offloads saved values, because their shapes would change."""
        for store in dag.of_type(Store):
            self.refuse(
                "filter",
                f"directive {store.origin} (offload) already offloads saved values, whose shapes would change",
                f"move this directive before directive {store.origin} [PIPER-D007]",
            )

    def completed(self, program: Sequence[Directive]) -> Sharding:
        if self.devices is not None or any(isinstance(place, Place) and place.axes for place in program):
            return self
        groups = groups_of(program)
        return dataclasses.replace(self, devices=groups) if groups else self

    def groups(self) -> list[tuple[int, ...]]:
        """Return the groups of the field `devices`, which must not be None."""
        assert self.devices is not None
        groups: Any = self.devices if isinstance(self.devices[0], list | tuple) else [self.devices]
        return [tuple(group) for group in groups]

    def mesh_of(self, dag: TrainingDAG, chunks: Sequence[Chunk]) -> Mesh:
        """Return the mesh of the chunks' group ranks. Raise an error if two device groups have different
        meshes."""
        found: dict[Mesh, Chunk] = {}
        meshes: dict[tuple[int, tuple[int, ...]], Mesh] = {}
        for chunk in chunks:
            where = (chunk.region if self.devices is None else 0, chunk.devices)
            if where not in meshes:
                meshes[where] = self._mesh_at(dag, chunk)
            found[meshes[where]] = chunk
        if len(found) > 1:
            shown = " and ".join(f"{chunk.label} on {list(chunk.devices)}" for chunk in found.values())
            if len({mesh.size(self.axis) for mesh in found}) > 1:
                different = f"{shown} have different numbers of devices along {self.axis!r}"
                self.refuse("devices", different, "give all groups the same number [PIPER-D005]")
            self.refuse(
                "devices",
                f"{shown} have their devices at different positions along {self.axis!r}",
                "give all groups meshes of one shape, with the devices and the axes in the same order [PIPER-D005]",
            )
        return next(iter(found))

    def _mesh_at(self, dag: TrainingDAG, chunk: Chunk) -> Mesh:
        """Return the mesh of one chunk's group ranks: the mesh of its `place`, reduced to the axes along
        which work is divided, or a mesh of `DATA` and `axis` that follows from `devices`. Raise an error if
        neither fits."""
        where = f"placed on {list(chunk.devices)}" if chunk.devices else "not placed yet"
        if self.devices is None:
            arranged = dag.arranged.get((chunk.region, chunk.devices))
            if arranged is None or arranged.size(self.axis) < 2:
                mesh = f"with the mesh {arranged}" if arranged else "without a mesh"
                found = f"{chunk.label} is {where}{f', {mesh}' if chunk.devices else ''}"
                advice = f"place it on a mesh with two or more devices along {self.axis!r}"
                self.refuse(
                    "axis", found, f"{advice}, such as {example_of(self.dividing_axes(dag))} [PIPER-D017]"
                )
            return arranged.against(*self.dividing_axes(dag))
        own = set(chunk.devices)
        here = [group for group in self.groups() if own.intersection(group)]
        if not here or sorted(device for group in here for device in group) != sorted(chunk.devices):
            given = [list(group) for group in self.groups()]
            if not chunk.devices and (forgotten := without_device(dag)) is not None:
                self.refuse("devices", *forgotten)
            advice = f"place it on one of the groups {given}"
            if len(chunk.devices) > 1:
                advice = "choose groups so that some of them together have exactly these devices"
                if not here:
                    advice = f"add groups that together have exactly these devices to {given}"
            self.refuse("devices", f"{chunk.label} is {where}", f"{advice} [PIPER-D005]")
        group_rank_of = {device: group_rank for group_rank, device in enumerate(chunk.devices)}
        lines = sorted(tuple(group_rank_of[device] for device in group) for group in here)
        return Mesh(
            (DATA, self.axis),
            (len(here), len(here[0])),
            tuple(group_rank for line in lines for group_rank in line),
        )
