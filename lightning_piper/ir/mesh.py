"""Meshes: the places of a group of devices, arranged along named axes.

A node's group lists its devices by *place*; the r-th is that of replica r. A value has one placement along each axis of a mesh, and
communication is along one axis: it joins the places whose other coordinates are the same, a *line*. Along `DATA`, members have the
same parameters and other samples. Along other axes parameters may be divided.

    Mesh(("data", "ep"), (2, 3), (0, 1, 2, 3, 4, 5))        ep ->
                                                      data  0 1 2     lines of ep: 0 1 2 and 3 4 5
                                                       |    3 4 5     lines of data: 0 3, 1 4 and 2 5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

DATA = "data"

Line = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """An array of places whose dimensions have names.

    Attributes:
        axes: names of the dimensions, `DATA` among them.
        shape: number of places along each.
        places: in row-major order of their coordinates.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    @cache
    def flat(size: int) -> Mesh:
        """All places along `DATA`."""
        return Mesh((DATA,), (size,), tuple(range(size)))

    def against(self, *axes: str) -> Mesh:
        """The same places along `DATA` and some axes; what is along all others is along `DATA`."""
        blocks = self.blocks(axes)
        shape = (len(blocks), *map(self.size, axes))
        return Mesh((DATA, *axes), shape, tuple(place for block in blocks for place in block))

    def blocks(self, axes: Sequence[str]) -> tuple[Line, ...]:
        """Places that differ along some axes only, in row-major order of their coordinates there, block by block."""
        kept = [self.axes.index(axis) for axis in axes]
        grid = np.array(self.places).reshape(self.shape)
        order = [*(d for d in range(len(self.axes)) if d not in kept), *kept]
        rows = grid.transpose(order).reshape(-1, math.prod(map(self.size, axes)))
        return tuple(map(tuple, rows.tolist()))

    def size(self, axis: str) -> int:
        """Places along an axis; 1 along one that the mesh does not have."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def lines(self, axis: str) -> tuple[Line, ...]:
        """The places, line by line."""
        return self._lines[axis]

    def line(self, axis: str, place: int) -> Line:
        """The line along an axis that a place is on."""
        return self._line_of[axis][place]

    @property
    def parts(self) -> int:
        """Into how many parts a parameter is that is divided along all axes but `DATA`."""
        return len(self.places) // self.size(DATA)

    def part(self, place: int, axes: Sequence[str]) -> int:
        """Which part a place has of what is divided along these axes: its row-major place in their block."""
        found = 0
        for axis in axes:
            found = found * self.size(axis) + self.line(axis, place).index(place)
        return found

    @cached_property
    def _lines(self) -> dict[str, tuple[Line, ...]]:
        grid = np.array(self.places).reshape(self.shape)
        moved = {axis: np.moveaxis(grid, i, -1).reshape(-1, self.shape[i]) for i, axis in enumerate(self.axes)}
        return {axis: tuple(map(tuple, lines.tolist())) for axis, lines in moved.items()}

    @cached_property
    def _line_of(self) -> dict[str, dict[int, Line]]:
        return {axis: {place: line for line in lines for place in line} for axis, lines in self._lines.items()}

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
