"""`place`: the device and the logical stream that run a part of the step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lightning_piper.common.limits import NAME, is_name, shown
from lightning_piper.common.units import counted
from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.directives.rewrites.transfers import place_around
from lightning_piper.directives.split import Split
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, Filter
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk


@register
@dataclasses.dataclass(frozen=True)
class Place(Directive):
    """Run the chunks that `filter` selects on `devices`. Where data crosses devices, insert a send and a
    receive.

        F[PP=0] @?  ->  F[PP=1] @1      --place {PP: 0} on [0]-->      F[PP=0] @0 -> send @0 -> recv @1 -> F[PP=1] @1

    Attributes:
        filter: Selects chunks by tags (default: all chunks).
        devices: One logical device, or a group of devices over which a `replicate` divides the work. A group
            may be a mesh, a nested list such as `[[0, 1], [2, 3]]`.
        axes: The names of a mesh's dimensions, such as `["dp", "ep"]`, from the outermost list on. A directive that shards
            may name one.
        stream: The logical stream that runs the chunks.

    After a split, the microbatches of a region may run on different devices, the region's device groups. Each
    group holds the region's parameters and sums the gradients of its own microbatches. The sums of the groups
    are added in the order of microbatches, the same on all devices.

    The bits do not change, because a transfer does not change values. But the gradients of a region with
    several groups are reassociated, and `apply` then returns the contract `reassociated`.
    """

    op: ClassVar[str] = "place"
    contract: ClassVar[Contract] = "bitwise"

    filter: Filter = dataclasses.field(default_factory=dict, kw_only=True)
    devices: Sequence[Any]
    _: dataclasses.KW_ONLY
    axes: Sequence[str] = ()
    stream: str = "compute"

    def kind_in(self, program: Sequence[Directive]) -> str:
        parts = {each.dim_name for each in program if isinstance(each, Split)}
        return f"{self.op} of microbatches" if parts & self.filter.keys() else self.op

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        if not self._good_axes():
            self.refuse(
                "axes",
                f"{shown(self.axes)} is not usable",
                f'give a list of different names of 1 to {NAME} printable characters, such as ["dp", "ep"] [PIPER-D003]',
            )
        if self.axes:
            if len(shape := _shape(self.devices)) != len(self.axes):
                if not shape:
                    lists = "a list" if len(self.axes) == 1 else "nested lists, of equal length on each level"
                    self.refuse(
                        "devices",
                        f"{shown(self.devices)} is not a mesh with the axes {list(self.axes)}",
                        f"give {lists}, such as {_nested(len(self.axes))} [PIPER-D003]",
                    )
                found = (
                    f"{shown(self.axes)} has {counted(len(self.axes), 'name')}, but {shown(self.devices)} has "
                    f"{counted(len(shape), 'dimension')}"
                )
                self.refuse("axes", found, "give one name for each level of lists [PIPER-D003]")
            self._check_mesh()
        elif len(_shape(self.devices)) > 1:
            self.refuse(
                "devices",
                f"{shown(self.devices)} is a mesh without names of its axes",
                "give one list of devices, or axes with one name for each of its "
                f"{len(_shape(self.devices))} dimensions [PIPER-D003]",
            )
        else:
            self.check_device_list("devices", self.devices)
        self.check_stream("stream", "compute")

    def _check_mesh(self) -> None:
        """Raise an error unless the mesh has distinct devices."""
        counts = Counter(device for device in self.group if type(device) is int and device >= 0)
        if wrong := [device for device in self.group if device not in counts]:
            found = f"{shown(self.devices)} has {shown(wrong[0])}, which is not a device index"
            self.refuse("devices", found, "give distinct integers >= 0 [PIPER-D003]")
        device, times = counts.most_common(1)[0]
        if times > 1:
            found = f"{shown(self.devices)} names device {device} more than once"
            self.refuse("devices", found, "name each device once [PIPER-D003]")
        self.check_device_list("devices", self.group)

    def _good_axes(self) -> bool:
        good = isinstance(self.axes, list | tuple) and all(map(is_name, self.axes))
        return good and len(set(self.axes)) == len(self.axes)

    @property
    def group(self) -> tuple[int, ...]:
        """All devices of the group, in the order of their group ranks."""
        group = tuple(self.devices)
        for _ in self.axes[1:]:
            group = tuple(device for row in group for device in row)
        return group

    @property
    def mesh(self) -> Mesh:
        """The mesh of the group ranks along the axes. It exists only if `axes` is not empty."""
        return Mesh(tuple(self.axes), _shape(self.devices), tuple(range(len(self.group))))

    def apply(self, dag: TrainingDAG) -> Contract | None:
        """Give the selected chunks their devices. Then place the nodes that follow from these chunks, and
        insert transfers. Raise an error if a chunk is already placed or ordered, or if the passes of a region
        would be on different devices.

        Returns:
            `reassociated` if a region has several device groups, otherwise None.
        """
        chunks, group = self.select(dag, "filter", self.filter), self.group
        if self.axes:
            mesh = self.mesh
            for chunk in chunks:
                if (other := dag.arranged.setdefault((chunk.region, group), mesh)) != mesh:
                    found = (
                        f"{chunk.label} would be on the mesh {mesh}, but another pass of the same region is on the "
                        f"mesh {other}"
                    )
                    self.refuse("axes", found, "give both places the same axes and devices [PIPER-D006]")
        for chunk in chunks:
            if chunk.devices:
                self.refuse(
                    "filter",
                    f"{chunk.label} is already on device {_shown(chunk.devices)} (directive "
                    f"{chunk.placed_by})",
                    "place each chunk once [PIPER-D006]",
                )
            if chunk.tags.get("PASS") == AGAIN:
                self.refuse(
                    "filter",
                    f"{chunk.label} is the second forward pass that directive {chunk.origin} makes",
                    "move this directive before the recompute [PIPER-D007]",
                )
            if (by := dag.ordered_by(chunk)) is not None:
                if any(
                    other.origin == by and other.tags.get("PASS") == AGAIN for other in dag.of_type(Chunk)
                ):
                    found = f"directive {by} makes second forward passes that wait for {chunk.label}"
                    self.refuse("filter", found, "move this directive before the recompute [PIPER-D007]")
                self.refuse(
                    "filter",
                    f"{chunk.label} is already ordered by directive {by}",
                    "move this directive before that order [PIPER-D007]",
                )
            dag.change(chunk, devices=group, stream=self.stream, placed_by=dag.origin)
        self._together(dag, chunks, group)
        return "reassociated" if place_around(dag, chunks) else None

    def _together(self, dag: TrainingDAG, chunks: list[Chunk], group: tuple[int, ...]) -> None:
        """Raise an error if the passes of a region for one slice would be on different devices (or groups), or
        if placed chunks would be on groups of different sizes.

        The backward pass reads values that the forward pass saved on its device.
        """
        placed = {(chunk.region, chunk.slice): chunk for chunk in chunks}
        for other in dag.of_type(Chunk):
            if other.devices and len(other.devices) != len(group):
                self.refuse(
                    "devices",
                    f"{list(group)} is a group of {len(group)}, but {other.label} is on a group of "
                    f"{len(other.devices)}",
                    "place every region on the same number of devices [PIPER-D005]",
                )
            mine = placed.get((other.region, other.slice))
            if mine is not None and other.devices not in ((), group):
                self.refuse(
                    "devices",
                    f"{mine.label} would be on device {_shown(group)}, but {other.label} is on "
                    f"{_shown(other.devices)}",
                    "place all passes of a microbatch on the same device, because the backward pass reads "
                    "saved values [PIPER-D006]",
                )


def groups_of(program: Sequence[Directive]) -> list[Any]:
    """Return the groups on which a program places chunks: a list of devices if there is one group, otherwise
    a list of groups. It is empty for a program without `place`."""
    groups = list(dict.fromkeys(directive.group for directive in program if isinstance(directive, Place)))
    return list(groups[0]) if len(groups) == 1 else [list(group) for group in groups]


def example_of(axes: Sequence[str]) -> str:
    """Return a place on a mesh with these axes, two devices along each of them, as text for messages."""
    return f"Place(devices={_nested(len(axes))}, axes={list(axes)})"


def _nested(levels: int) -> str:
    """Return lists of devices with this number of levels, two entries on each of them, as text."""
    if levels > 5:
        return "[[[0, 1], ...], ...]"
    return str(np.arange(2**levels).reshape((2,) * levels).tolist())


def _shape(devices: Any) -> tuple[int, ...]:
    """Return the lengths of nested lists on each level. Return an empty tuple if the lists of a level differ
    in length, or if a level mixes lists and devices.
    """
    level: list[Any] = [devices]
    shape: tuple[int, ...] = ()
    while (
        all(isinstance(row, list | tuple) for row in level)
        and len(sizes := {len(row) for row in level}) == 1
        and sizes != {0}
    ):
        shape += (sizes.pop(),)
        level = [item for row in level for item in row]
    return shape if not any(isinstance(row, list | tuple) for row in level) else ()


def _shown(devices: Sequence[int]) -> str:
    return ",".join(map(str, devices))
