"""The devices of a step in columns: which plans are compiled together, and which are the same.

A node lists the devices of its group by rank, and a device has the same rank in all of its groups. The
devices with one rank form a *column*; the groups are rows::

                 rank 0   1   2   3
    group PP=0        0   1   2   3      messages go from row to row, within a column
    group PP=1        4   5   6   7      collectives join the members of a row, across columns
                      column 1 is 1, 5

The plans of a column are therefore compiled without the other columns. If rows meet in every column in the
same way, columns are interchangeable (`alike`): renaming devices turns one column into another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ops.base import nothing, operation_of
from lightning_piper.ops.results import Result

Column = tuple[int, ...]  # devices, one of each row in which the column has a device


@dataclass(frozen=True)
class Columns:
    """A partition of the devices into columns whose plans are compiled together.

    Attributes:
        columns: The columns. Every device is in one of them. If the groups do not form columns, there is one
            column of all devices (`columns_of`).
        alike: Whether renaming devices turns any column into any other column: the i-th devices of all columns
            do the same work. True if there is one column.
        group_rank_of: The group rank of each device.
    """

    columns: tuple[Column, ...]
    alike: bool
    group_rank_of: Mapping[int, int]

    @cached_property
    def index(self) -> Mapping[int, tuple[int, int]]:
        """Device -> its column, and its position in the column."""
        return {device: (c, i) for c, column in enumerate(self.columns) for i, device in enumerate(column)}

    def column_of(self, device: int) -> Column:
        return self.columns[self.index[device][0]]

    def together(self) -> Columns:
        """Return the same devices in one column."""
        return Columns((tuple(sorted(self.index)),), True, self.group_rank_of)


def columns_of(dag: TrainingDAG) -> Columns:
    """Return the columns of a finished DAG, in time linear in its nodes and in the sizes of its groups.

    There is one column of all devices if groups have different sizes, if a device has several ranks, or if a
    device has only nodes that run everywhere.
    """
    everybody = dag.devices()
    group_rank_of: dict[int, int] = {}
    # A device without chunks of a forward-only step still receives the return values, if there are any.
    for row in _distinct(node for kind in (Chunk, Result) for node in dag.of_type(kind)):
        for p, device in enumerate(row):
            group_rank_of.setdefault(device, p)
    for device in everybody:
        group_rank_of.setdefault(device, 0)
    rows = _distinct(node for node in dag.nodes.values() if not node.everywhere)
    size = len(dag.mesh.group_ranks)
    columns = tuple(
        tuple(dict.fromkeys(row[p] for row in rows)) for p in range(min(map(len, rows), default=0))
    )
    regular = all(
        len(row) == size and all(group_rank_of[device] == p for p, device in enumerate(row)) for row in rows
    )
    if not regular or sum(map(len, columns)) != len(everybody):
        return Columns((everybody,), True, group_rank_of)
    kinds = {type(node): node for node in dag.nodes.values()}
    meet = {tuple(column.index(row[p]) for row in rows) for p, column in enumerate(columns)}
    # A node that runs everywhere must have all devices. Then renaming devices does not change its group.
    whole = all(
        group == everybody for group in _distinct(node for node in dag.nodes.values() if _joins_rows(node))
    )
    alike = len(meet) == 1 and whole and all(operation_of(node).alike for node in kinds.values())
    return Columns(columns, alike, group_rank_of)


def _joins_rows(node: Node) -> bool:
    return node.everywhere and operation_of(node).lower is not nothing


def _distinct(nodes: Iterable[Node]) -> list[tuple[int, ...]]:
    """Return the distinct groups of some nodes, in order of appearance."""
    by_identity = {id(node.devices): node.devices for node in nodes}  # most nodes share group objects
    return list(dict.fromkeys(by_identity.values()))
