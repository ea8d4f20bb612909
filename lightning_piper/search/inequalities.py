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
from lightning_piper.search.estimate import AWAY, Way
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
    memory = [
        ((what, group[rank], number), counted)
        for rank in range(rows.ranks)
        for what, found in (
            (RUNS, [_counted(rows, rank, own, state) for own, state in _largest(rows, rank)]),
            (HOST, [_on_host(rows, rank)]),
            (UPDATES, [_updates(rows, rank)]),
        )
        for number, counted in enumerate(found)
    ]
    names = [name for name, _ in memory]
    saved, kept, static = (
        _means(names, np.stack(column)) for column in zip(*(counted for _, counted in memory), strict=True)
    )
    of_what = np.array([what for what, _, _ in dict.fromkeys(names)])
    return Table(*_times(rows, group, SEARCHED[key[0]].split), saved, kept, static, of_what)


def _times(rows: Rows, group: Sequence[int], split: bool) -> tuple[Array, Array, Array]:
    """Return `Table.passes`, `Table.sums` and `Table.borders`.

    Args:
        rows: The rows of the schedule.
        group: The group of each rank.
        split: Whether backward passes are split.
    """
    every = [
        ((group[rank], number, what), span)
        for rank, pairs in enumerate(rows.between)
        for number, span in enumerate(pairs)
        for what in ("sum", "pass")
        if what == "pass" or span.last[1] != BI
    ]
    names = [name for name, _ in every]
    # Each array has a row for each inequality. Rows of shape (1) become rows of stages.
    stage = np.arange(rows.stages)
    first, last = (np.array([[own[end][0]] for _, own in every]) for end in (0, 1))
    forward = np.array([[own.first[1] == F] for _, own in every])
    summed = np.array([[what == "sum"] for _, _, what in names])
    followed = ~summed & np.array([[own.last[1] != BW] for _, own in every])
    count = [
        (line, part, s, n)
        for line, (_, own) in enumerate(every)
        for s, kind, n in own.passes
        for part in _PARTS[kind]
    ]
    *where, times = np.array(count).T
    passes = np.zeros((len(every), 3, rows.stages))
    np.add.at(passes, tuple(where), times)
    # Before the span: F of the stages before its first stage, or all F and the backward passes of the stages
    # after its first stage. After the span: the backward passes of the stages before its last stage.
    passes[:, 0] += ~forward | (stage < first)
    waiting = (~forward & (stage > first)) * 1.0 + (followed & (stage < last))
    passes[:, slice(1, 2 if split else 3)] += waiting[:, None]
    border = stage[:-1]
    borders = np.where(forward, border < first, 1.0 + (border >= first)) + (followed & (border < last))
    return _means(names, passes), _means(names, (summed & (stage == last)) * 1.0), _means(names, borders)


def _means(names: Sequence[object], values: Array) -> Array:
    """Return the mean of the values of each name, in the order of the names' first values."""
    number = {name: k for k, name in enumerate(dict.fromkeys(names))}
    own = np.array([number[name] for name in names])
    order = np.argsort(own, kind="stable")
    sums = np.add.reduceat(values[order], np.searchsorted(own[order], np.arange(len(number))))
    found: Array = sums / np.bincount(own).reshape(-1, *[1] * (values.ndim - 1))
    return found


def _largest(rows: Rows, rank: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Return up to `STATES` entries of `Rows.kept` in which a rank keeps most, and the entry with most values
    for BW: these stay on the device even if all stages recompute."""
    kept = rows.kept[rank]
    largest = sorted(kept, key=lambda item: -sum(2 * a + w for a, w in item[1]))[:STATES]
    return list(dict.fromkeys((*largest, max(kept, key=lambda item: sum(w for _, w in item[1])))))


def _counted(
    rows: Rows, rank: int, own: int, state: tuple[tuple[int, int], ...]
) -> tuple[Array, Array, Array]:
    """Return the rows of `Table.saved`, `Table.kept` and `Table.static` for the device in a state of
    `Rows.kept`. They count bytes in the same way as `saved_bytes`. `own` is the stage whose B or BI runs, or
    -1."""
    saved, kept, static = np.zeros((rows.stages, 3)), np.zeros((rows.stages, 3)), np.zeros(rows.stages)
    for stage, (a, w) in zip(rows.local[rank], state, strict=True):
        saved[stage] = a, own == stage, min(a, 2)  # PLAIN, AGAIN, AWAY
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
_PARTS = {F: (0,), B: (1, 2), BI: (1,), BW: (2,)}
