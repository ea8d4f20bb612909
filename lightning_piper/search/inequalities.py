"""Inequalities that hold for the ranks of a schedule, whatever blocks its stages contain.

- Time: the passes of a span of a rank's work, with the work before and after the span, take at most the time
  of the step.
- Memory: the bytes that a rank keeps in a state of the schedule are at most its memory.

`joint_bounds` adds these inequalities, each with a weight, to get a lower bound of the step's time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.estimate import AGAIN, AWAY, PLAIN, Way
from lightning_piper.search.rows import BI, BW, B, F, Rows, rows_of

GROUPS = 10  # number of groups of neighboring ranks; a group has one weight
STATES = 3  # number of the largest states of each rank that become inequalities
Array = NDArray[np.float64]
Key = tuple[str, int, int, int]  # (schedule, stages on each rank, ranks, microbatches)
# Kinds of memory: of a device while passes run, of the host, and of a device while the optimizer updates.
RUNS, HOST, UPDATES = range(3)


class Table(NamedTuple):
    """A table of inequalities of a schedule: how often each cost of a stage counts in each inequality. A
    group of ranks has the mean of the inequalities of its ranks. Parentheses contain the dimensions of an
    array.

    Attributes:
        passes: How often F, BI and BW of each stage count (time inequalities, 3, stages).
        sums: How often the sum of a stage's gradients counts (time inequalities, stages).
        `borders`: How often a message across each boundary counts (time inequalities, stages - 1).
        saved: For how many microbatches the bytes count that F saves, for each way of the stage (memory
            inequalities, stages, ways).
        kept: The same for the bytes that are kept for BW.
        static: Whether the parameters, gradients and optimizer states of a stage count (memory inequalities,
            stages).
        of_what: The kind of memory: `RUNS`, `HOST` or `UPDATES` (memory inequalities).
    """

    passes: Array
    sums: Array
    borders: Array
    saved: Array
    kept: Array
    static: Array
    of_what: NDArray[np.int64]

    def of(self, ways: Sequence[Way], updates: bool) -> Table:
        """Return the table with one entry of the dimension `ways` for each of these ways. It has inequalities
        of updates only if `updates` is set."""
        rows = np.flatnonzero((self.of_what != UPDATES) | updates)
        return self._replace(
            saved=self.saved[rows][:, :, ways],
            kept=self.kept[rows][:, :, ways],
            static=self.static[rows],
            of_what=self.of_what[rows],
        )

    @property
    def updates(self) -> Array:
        """Whether updates of a stage's parameters count (memory inequalities, stages)."""
        found: Array = self.static * (self.of_what == UPDATES)[:, None]
        return found


@functools.lru_cache(maxsize=256)
def table_of(key: Key) -> Table:
    """Return the inequalities of a schedule. The result is cached.

    Each span of a rank (`Between`) gives an inequality "pass". It counts the passes and messages that lead to
    the span, the span, and the backward passes of earlier stages that wait for it. If the last pass makes
    gradients of weights, the span also gives an inequality "sum", which ends with the sum of these gradients
    over the replicas.

    Each rank gives memory inequalities: of the states in which it keeps most, of its host, and of the update
    of its parameters. The ranks are divided into `GROUPS` groups of neighbors. Of each inequality, the table
    has the mean over the ranks of a group.
    """
    rows = rows_of(*key)
    group = [rank * GROUPS // max(rows.ranks, GROUPS) for rank in range(rows.ranks)]
    times: dict[tuple[object, ...], list[tuple[Array, Array, Array]]] = {}
    bytes_: dict[tuple[int, ...], list[tuple[Array, Array, Array]]] = {}
    back = slice(1, 2) if SEARCHED[key[0]].split else slice(1, 3)  # passes that other stages wait for
    for rank, pairs in enumerate(rows.between):
        for index, ((first, kind), (last, ends), passes) in enumerate(pairs):
            found = np.zeros((3, rows.stages))
            sums = np.zeros(rows.stages)
            borders = np.zeros(max(rows.stages - 1, 0))
            # Before the span: F of the stages before its first stage, or all F and the backward passes of the
            # stages after its first stage.
            if kind == F:
                found[0, :first] += 1
                borders[:first] += 1
            else:
                found[0] += 1
                found[back, first + 1 :] += 1
                borders += 1
                borders[first:] += 1
            for stage, which, n in passes:
                found[_PARTS[which], stage] += n
            if ends != BI and rows.stages:
                sums[last] += 1
                times.setdefault((group[rank], index, "sum"), []).append((found.copy(), sums, borders.copy()))
            # After the span: the backward passes of the stages before its last stage.
            if ends != BW:
                found[back, :last] += 1
                borders[:last] += 1
            times.setdefault((group[rank], index, "pass"), []).append((found, np.zeros(rows.stages), borders))
        for number, (own, state) in enumerate(_largest(rows, rank)):
            bytes_.setdefault((RUNS, group[rank], number), []).append(_counted(rows, rank, own, state))
        bytes_.setdefault((HOST, group[rank]), []).append(_on_host(rows, rank))
        bytes_.setdefault((UPDATES, group[rank]), []).append(_updates(rows, rank))
    time, memory = [_mean(times[name]) for name in times], [_mean(found) for found in bytes_.values()]
    passes_, sums_, borders_ = (np.stack(column) for column in zip(*time, strict=True))
    saved, kept, static = (np.stack(column) for column in zip(*memory, strict=True))
    return Table(passes_, sums_, borders_, saved, kept, static, np.array([name[0] for name in bytes_]))


def _mean(found: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Return the element-wise mean of the triples, for each of the three arrays."""
    first, second, third = (np.mean(np.stack(column), axis=0) for column in zip(*found, strict=True))
    return first, second, third


def _largest(rows: Rows, rank: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Return up to `STATES` entries of `Rows.kept`: those in which a rank keeps most."""
    return sorted(rows.kept[rank], key=lambda item: -sum(2 * a + w for a, w in item[1]))[:STATES]


def _counted(
    rows: Rows, rank: int, own: int, state: tuple[tuple[int, int], ...]
) -> tuple[Array, Array, Array]:
    """Return the rows of `Table.saved`, `Table.kept` and `Table.static` for the device in a state of
    `Rows.kept`. They count bytes in the same way as `saved_bytes`. `own` is the stage whose B or BI runs, or
    -1."""
    saved, kept, static = np.zeros((rows.stages, 3)), np.zeros((rows.stages, 3)), np.zeros(rows.stages)
    for stage, (a, w) in zip(rows.local[rank], state, strict=True):
        saved[stage, [PLAIN, AGAIN, AWAY]] = a, own == stage, min(a, 2)
        kept[stage] = w
        static[stage] = 1
    return saved, kept, static


def _on_host(rows: Rows, rank: int) -> tuple[Array, Array, Array]:
    """Return the rows of `Table.saved`, `Table.kept` and `Table.static` for the host, in the state of the
    rank with most saved values."""
    saved, none = np.zeros((rows.stages, 3)), np.zeros((rows.stages, 3))
    _, state = max(rows.kept[rank], key=lambda item: sum(a for a, _ in item[1]))
    for stage, (a, _) in zip(rows.local[rank], state, strict=True):
        saved[stage, AWAY] = a
    return saved, none, np.zeros(rows.stages)


def _updates(rows: Rows, rank: int) -> tuple[Array, Array, Array]:
    """Return the rows of `Table.saved`, `Table.kept` and `Table.static` for the update, when no saved values
    are left."""
    none, static = np.zeros((rows.stages, 3)), np.zeros(rows.stages)
    static[list(rows.local[rank])] = 1
    return none, none, static


# Kind of a pass -> the indices of the dimension of F, BI and BW of `Table.passes` in which it counts.
_PARTS = {F: slice(0, 1), B: slice(1, 3), BI: slice(1, 2), BW: slice(2, 3)}
