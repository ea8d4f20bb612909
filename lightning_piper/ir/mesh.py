"""Meshes: the ranks of a device group, arranged along named axes.

A node lists the devices of its group by group rank. A value has one placement
along each axis of a mesh. A collective communicates along one axis, among the ranks that share all other
coordinates: a *line*. Along `DATA`, members have the same parameters and different samples. Along other axes,
parameters may be divided.

    Mesh(("data", "ep"), (2, 3), (0, 1, 2, 3, 4, 5))        ep ->
                                                      data  0 1 2     lines of ep: 0 1 2 and 3 4 5
                                                       |    3 4 5     lines of data: 0 3, 1 4 and 2 5
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

DATA = "data"
# Along this axis, members have the same shards, and terms of one sum of gradients (HSDP). Only the meshes of
# buckets have it.
GROUPS = "groups"

Line = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """An array of group ranks with named dimensions.

    Attributes:
        axes: Names of the dimensions, including `DATA`.
        shape: Size of each dimension.
        group_ranks: The group ranks in row-major order of their coordinates.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    group_ranks: tuple[int, ...]

    @staticmethod
    @cache
    def flat(size: int) -> Mesh:
        """Return a mesh with all group ranks along `DATA`."""
        return Mesh((DATA,), (size,), tuple(range(size)))

    def against(self, *axes: str) -> Mesh:
        """Return the mesh with only these axes and `DATA`. The other axes become part of `DATA`."""
        blocks = self.blocks(axes)
        shape = (len(blocks), *map(self.size, axes))
        return Mesh((DATA, *axes), shape, tuple(group_rank for block in blocks for group_rank in block))

    def grouped(self, group_of: Mapping[int, int]) -> Mesh:
        """Return the mesh with the lines of `DATA` divided into groups, along the new axis `GROUPS`.

        `DATA` then has the members of one group, in their order. If all members of each line are in one group, return
        this mesh.

            data=4                  --grouped({0: 0, 1: 0, 2: 1, 3: 1})-->  data ->
            0 1 2 3                                                 groups  0 1
                                                                      |     2 3

        Args:
            group_of: The group of each group rank.

        Raises:
            ValueError: Two groups have different numbers of members of a line, or two lines have members of
                different numbers of groups.
        """
        rows = []
        for line in self.lines(DATA):
            found: dict[int, list[int]] = {}
            for group_rank in line:
                found.setdefault(group_of[group_rank], []).append(group_rank)
            rows.append([found[group] for group in sorted(found)])
        sizes = {tuple(map(len, row)) for row in rows}
        shape = next(iter(sizes))
        if len(sizes) > 1 or len(set(shape)) > 1:
            raise ValueError(f"groups of different sizes: {sorted(sizes)}")
        if len(shape) == 1:
            return self
        axis = self.axes.index(DATA)
        others = self.shape[:axis] + self.shape[axis + 1 :]
        grid = np.moveaxis(np.array(rows).reshape(*others, len(shape), shape[0]), (-2, -1), (axis, axis + 1))
        return Mesh(
            (*self.axes[:axis], GROUPS, DATA, *self.axes[axis + 1 :]),
            grid.shape,
            tuple(grid.ravel().tolist()),
        )

    def blocks(self, axes: Sequence[str]) -> tuple[Line, ...]:
        """Return the blocks of group ranks that differ along `axes` only, in row-major order along `axes`."""
        kept = [self.axes.index(axis) for axis in axes]
        grid = np.array(self.group_ranks).reshape(self.shape)
        order = [*(d for d in range(len(self.axes)) if d not in kept), *kept]
        rows = grid.transpose(order).reshape(-1, math.prod(map(self.size, axes)))
        return tuple(map(tuple, rows.tolist()))

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 for an axis that the mesh does not have."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def lines(self, axis: str) -> tuple[Line, ...]:
        """Return the lines along an axis."""
        return self._lines[axis]

    def line(self, axis: str, group_rank: int) -> Line:
        """Return the line along an axis that contains a group rank."""
        return self._line_of[axis][group_rank]

    @property
    def parts(self) -> int:
        """The number of parts of a parameter that is divided along all axes except `DATA`."""
        return len(self.group_ranks) // self.size(DATA)

    def part(self, group_rank: int, axes: Sequence[str]) -> int:
        """Return the row-major index of a group rank's part of a tensor that is divided along `axes`."""
        found = 0
        for axis in axes:
            found = found * self.size(axis) + self.line(axis, group_rank).index(group_rank)
        return found

    @cached_property
    def _lines(self) -> dict[str, tuple[Line, ...]]:
        grid = np.array(self.group_ranks).reshape(self.shape)
        moved = {
            axis: np.moveaxis(grid, i, -1).reshape(-1, self.shape[i]) for i, axis in enumerate(self.axes)
        }
        return {axis: tuple(map(tuple, lines.tolist())) for axis, lines in moved.items()}

    @cached_property
    def _line_of(self) -> dict[str, dict[int, Line]]:
        return {
            axis: {group_rank: line for line in lines for group_rank in line}
            for axis, lines in self._lines.items()
        }

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
