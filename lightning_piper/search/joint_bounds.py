"""A bound of whole layouts and choices, however blocks are cut, from the work and memory of all ranks.

For each rank, `bounds` states: head + work of the passes between + tail <= time. Heads, work and tails are
sums over stages: the seconds of a pass of the stage, times how often it counts. The bytes that a rank keeps
in a state of its schedule are also sums over stages, and they are at most its memory. So a weighted sum of
these inequalities is an inequality. Its weights are p >= 0 of the time inequalities, with sum 1, and q >= 0
of the memory inequalities, in seconds for all of a device's memory.

How much a block adds to the sum depends on its stage and option. The smallest of these amounts, summed over
the blocks, gives a bound:

    time >= sum over blocks of min over stages and options of (p counts passes + q counts bytes / memory)
            - sum of q

No stage is empty. So a block can only be in a stage if enough blocks are before and after it. A second
consequence can raise the bound. Choose some u >= 0 for each stage. Let each block of the stage add u less,
and add the sum of all u to the bound. Because each stage has at least one block, the bound stays valid.

Some bytes exist once on a rank for several blocks: a parameter that several blocks use, or the temporary
tensors of the largest update. They count with one of these blocks. If some of the blocks must be on this
rank, they count with such a block.

The bound holds for any weights. The best weights solve a linear program, the dual of a relaxation in which
parts of a block may lie in several stages. A few steps of the simplex method come close, and the weights
after each step give a bound. To make this program small, neighboring ranks share one weight, and similar
blocks count as equal. The weights are then evaluated for the original blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_piper.search.estimate import AGAIN, AWAY, Option, Way
from lightning_piper.search.inequalities import Array, Table, table_of
from lightning_piper.search.rows import BI, B, Rows, rows_of
from lightning_piper.search.space import Layout
from lightning_piper.search.stage_costs import CostModel, Costs
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.network import Link

KINDS = 4  # largest number of kinds of blocks if `_alike` groups blocks by their work
# If there are at most this many combinations of kind, stage and option, each different block is a kind of its
# own.
PLACES = 600
STEPS = 400  # largest number of steps of the simplex method
DEAR = 20.0  # largest sum of the weights q in the linear program, as a multiple of a rough time of the step
_ROUNDING = 1 - 1e-9  # lowers bounds by more than the rounding error of a sum of a few thousand doubles


class _Blocks(NamedTuple):
    """A table of the costs of each block, or of each kind of blocks. Parentheses contain the dimensions of an
    array.

    Attributes:
        passes: Seconds of F, BI and BW (blocks, options, 3).
        sums: Seconds of the sum of gradients (blocks, options).
        start: Seconds of the gather at the beginning of the step, if the block is in the first stage (blocks,
            options).
        saved, kept: Bytes that forward passes save, and that are kept for BW (blocks).
        static: Bytes of parameters, gradients and states (blocks, stages, options). If all stages have the
            same, stages has size 1.
        updated: Bytes of temporary tensors of the update, with the shape of `static`.
    """

    passes: Array
    sums: Array
    start: Array
    saved: Array
    kept: Array
    static: Array
    updated: Array


class Together:
    """Computes lower bounds of the time of a model's layouts from all ranks together."""

    def __init__(self, model: CostModel) -> None:
        self._model, self.space = model, model.space
        # Layout, number of memory inequalities -> the last weights p, q and u.
        self._known: dict[tuple[Layout, int], tuple[Array, Array, Array]] = {}

    def time(
        self, layout: Layout, options: Sequence[Sequence[Option]], enough: float, rough: bool = False
    ) -> float:
        """Return a lower bound of the seconds of a step, at most `enough`. It is 0 if no weights with a bound are found,
        or if the messages between stages alone fill the memory.

        Args:
            layout: The layout of the stages.
            options: For each stage, the (level, way) that it may have.
            enough: The search for better weights stops when the bound has this many seconds, because a larger
                bound would not help.
            rough: If weights for a different numbering of the devices are known, do not search for better ones.
        """
        costs = self._model.costs(layout)
        table = table_of((layout.schedule, layout.per_rank, layout.ranks, layout.microbatches))
        every, allowed, blocks = self._blocks(costs, options, enough)
        table = table.of([way for _, way in every], bool(blocks.updated.any()))
        constant = 2 * float(costs.least_output) if layout.ranks > 1 else 0.0
        room = float(self.space.memory) / (1 + float(self.space.margin)) - constant
        # Inequalities are divided by their limit. A larger limit keeps the bound valid, so a limit of 0
        # becomes 1 byte.
        limits = np.array([room, max(float(self.space.hardware.host_memory), 1.0), room + constant])[
            table.of_what
        ]
        if room <= 0:
            return 0.0  # `Cutting` reports that nothing fits
        finite = np.isfinite(limits)
        inverse = np.where(finite, 1 / np.where(finite, limits, 1), 0)
        hops = np.array([float(costs.least_hop(border)) for border in range(layout.stages - 1)])
        before = table.borders @ hops if len(hops) else np.zeros(len(table.passes))
        inside = _inside(len(blocks.sums), layout.stages)
        possible = inside[:, :, None] & allowed

        def bound(p: Array, q: Array, u: Array) -> float:
            """Return the bound that these weights give, or 0 if no time inequality has a weight."""
            if not p.sum() > 0:
                return 0.0
            each = _each(table, blocks, p, q * inverse) - u[:, None]
            least = np.where(possible, each, np.inf).min(axis=(1, 2)).sum()
            return min(float((least + u.sum() + p @ before - q[finite].sum()) / p.sum()) * _ROUNDING, enough)

        # Good weights for the layout with a different numbering of its devices are often good enough.
        alike = layout._replace(routed=1, data_inside=True, groups=1), len(inverse)
        if alike in self._known and ((least := bound(*self._known[alike])) >= enough or rough):
            return least
        counts, kinds, members = _alike(blocks, max(KINDS, PLACES // allowed.size))
        some = (members.T @ inside > 0)[:, :, None] & allowed  # (kinds, stages, options)
        weights = self._known[alike] = _weights(_columns(table, kinds, inverse), counts, some, before, enough)
        return bound(*weights)

    def _blocks(
        self, costs: Costs, options: Sequence[Sequence[Option]], enough: float
    ) -> tuple[list[Option], NDArray[np.bool_], _Blocks]:
        """Return the options that matter, which stages have them (stages, options), and the costs of blocks.

        A pass of a stage takes at least the longest of three times: of its work, of its transfer to the host,
        and of the gather of its parameters. `_passes` chooses one of the three for the whole model.

        A level does not matter if the stage may also have a higher level that takes at most as much time,
        because the lower level needs more memory.
        """
        prices = _OptionPrices(costs, enough)

        def matter_of(own: tuple[Option, ...]) -> set[Option]:
            return {
                (x, way)
                for x, way in own
                if not any(y > x and other == way and prices.is_slower(x, y, way) for y, other in own)
            }

        each = {own: matter_of(own) for own in set(map(tuple, options))}
        matter = [each[tuple(own)] for own in options]
        every = sorted(set().union(*matter))
        allowed = np.array([[option in own for option in every] for own in matter])
        return every, allowed, prices.blocks(every)


class _OptionPrices:
    """The seconds and bytes that each block adds with an option: a level and a way.

    Args:
        costs: The costs of a layout.
        enough: See `Together.time`. The bytes are lower bounds only for programs that take less time.
    """

    def __init__(self, costs: Costs, enough: float) -> None:
        """Compute the costs of each block that do not depend on the option, or depend only on its level."""
        layout, n = costs.layout, costs.blocks
        # Seconds of F, BI and BW, bytes that F saves, and bytes kept for BW: an array (blocks) each.
        self._work = [np.diff(np.array(column, dtype=np.float64)) for column in _sums(costs)]
        nbytes = np.diff(np.array(costs.params.untied)).astype(np.float64).T  # (blocks, 4)
        owned, trained = nbytes[:, :2].copy(), nbytes[:, 2:].copy()
        self._replicas, self._routed = layout.shard_size, layout.shard_size // layout.routed
        self._states = float(costs.states)
        none, gather = np.zeros(n), _collective(owned, costs.gather_slopes())
        self._away = _moved(costs.host, self._work[3])  # seconds to offload the saved values
        # For each level: the gather during a pass, the gather at the start of the step, the sum of gradients.
        self._gathers = [none, none, none, gather]
        self._starts = [none, gather, gather, gather]
        self._sums = [_collective(trained, costs.reduction_slopes(level)) for level in range(4)]
        rows = rows_of(layout.schedule, layout.per_rank, layout.ranks, layout.microbatches)
        self._kinds = _pass_kinds(rows)
        self._charged = _charged(costs, rows, owned, trained)
        # A rank with more blocks takes longer than `enough`.
        work = np.sort(sum(self._work[:3])) * layout.microbatches
        self._most = min(
            int((work.cumsum() * _ROUNDING <= enough).sum()), n + layout.per_rank - layout.stages
        )
        # Cache results, because many stages have the same options. `functools.cache` on methods would keep
        # the object alive in a cycle.
        self._known_passes: dict[Option, Array] = {}
        self._known_slower: dict[tuple[int, int, Way], bool] = {}

    def _passes(self, level: int, way: Way) -> Array:
        """Return the seconds of F, BI and BW of each block with this option. The result is cached."""
        if (level, way) not in self._known_passes:
            f, bi, bw, _, _ = self._work
            self._known_passes[level, way] = _passes(
                self._kinds, f, bi, bw, way, self._gathers[level], self._away
            )
        return self._known_passes[level, way]

    def is_slower(self, level: int, other: int, way: Way) -> bool:
        """Return whether `level` takes at least as much time as `other`, for each block in each part of the
        step."""
        key = level, other, way
        if key not in self._known_slower:
            self._known_slower[key] = self._compare(*key)
        return self._known_slower[key]

    def _compare(self, level: int, other: int, way: Way) -> bool:
        pairs = (
            (self._passes(level, way), self._passes(other, way)),
            (self._sums[level], self._sums[other]),
            (self._starts[level], self._starts[other]),
        )
        return all(bool((mine >= yours).all()) for mine, yours in pairs)

    def _held(self, nbytes: Array, shared: bool) -> Array:
        """Return the bytes on one device of parameters outside of experts (nbytes[..., 0]) and of experts
        (nbytes[..., 1]). With `shared`, the replicas shard them."""
        found: Array = (
            nbytes[..., 0] / self._replicas + nbytes[..., 1] / self._routed if shared else nbytes.sum(axis=-1)
        )
        return found

    def _static(self, level: int) -> Array:
        """Return the bytes of parameters, gradients and states, as (blocks, stages).

        A rank gathers two blocks at a time. The larger one has at least the mean of the bytes of the rank's blocks.
        """
        owned, trained = self._charged.owned, self._charged.trained
        found = self._states * self._held(trained, level > 0)
        for nbytes, shared in ((owned, level == 3), (trained, level > 1)):
            own, whole = self._held(nbytes, shared), self._held(nbytes, False)
            found = found + np.minimum(own + whole * (2 / max(self._most, 2)), whole)
        return found

    def blocks(self, options: Sequence[Option]) -> _Blocks:
        """Return the costs of each block with each of these options."""
        _, _, _, saved, kept = self._work
        return _Blocks(
            passes=np.stack([self._passes(*option) for option in options], axis=1),
            sums=np.stack([self._sums[level] for level, _ in options], axis=1),
            start=np.stack([self._starts[level] for level, _ in options], axis=1),
            saved=saved,
            kept=kept,
            static=np.stack([self._static(level) for level, _ in options], axis=2),
            updated=np.stack([self._charged.updated[level] for level, _ in options], axis=2),
        )


class _Charged(NamedTuple):
    """A table of the bytes that a block adds at least to the rank of one of its possible stages.

    If all stages have the same bytes, the dimension of stages has size 1. Bytes that a rank has once for
    several blocks count with one of these blocks.

    Attributes:
        owned, trained: Bytes of parameters, and of trained parameters (blocks, stages, 2: outside of experts
            and of experts).
        updated: Bytes of temporary tensors of the update (levels, blocks, stages).
    """

    owned: Array
    trained: Array
    updated: Array


def _charged(costs: Costs, rows: Rows, owned: Array, trained: Array) -> _Charged:
    """Return the bytes that each block adds to a rank.

    A parameter that several blocks use, and the largest update, count with one block of each rank. If a block
    must be on this rank, they count with this block.

    Args:
        costs, rows: The costs of a layout, and the rows of its schedule.
        owned, trained: Bytes of parameters, and of trained parameters, that only one block uses (blocks, 2:
            outside of experts and of experts).
    """
    blocks, stages = costs.blocks, rows.stages
    updates = np.array(
        [[costs.updating(((k, k + 1),), (level,)) for level in range(4)] for k in range(blocks)]
    )
    if not costs.params.tied and not updates.any():
        return _Charged(owned[:, None], trained[:, None], np.zeros((4, blocks, 1)))
    rank = np.array(rows.rank)
    # (blocks, ranks): whether the block can be on the rank, and whether it can only be on this rank.
    there = (_inside(blocks, stages) @ np.eye(rows.ranks)[rank] > 0).astype(int)
    certain = there * (there.sum(axis=1) == 1)[:, None]
    found = [np.repeat(nbytes[:, None], stages, axis=1) for nbytes in (owned, trained)]
    for tied in costs.params.tied:
        users = np.array(tied.blocks)
        user = users[np.argmax(there[users] + certain[users], axis=0)][rank]
        found[0][user, np.arange(stages), int(tied.is_routed)] += tied.nbytes
        found[1][user, np.arange(stages), int(tied.is_routed)] += tied.nbytes * tied.trains
    updated = np.zeros((4, blocks, stages))
    for r, local in enumerate(rows.local):
        k = int(np.lexsort((certain[:, r], there[:, r] * updates[:, 0]))[-1])
        updated[:, k, list(local)] = updates[k, :, None]
    return _Charged(found[0], found[1], updated)


def _collective(nbytes: Array, slopes: tuple[Number, Number]) -> Array:
    """Return the seconds of a collective of each block, without the part that does not depend on the
    bytes."""
    found: Array = nbytes @ np.array([float(slope) for slope in slopes])
    return found


def _sums(costs: Costs) -> tuple[Sequence[float], ...]:
    """Return prefix sums over the blocks as floats: seconds of F, BI and BW, bytes that F saves, bytes kept
    for BW."""
    return tuple(
        [float(x) for x in column]
        for column in (costs.forward, costs.inputs, costs.weights, costs.saved, costs.kept)
    )


def _moved(link: Link, nbytes: Array) -> Array:
    """Return, for each block, the seconds of a message with its bytes, without the latency."""
    return np.zeros_like(nbytes) if link.bandwidth is None else nbytes / float(link.bandwidth)


def _pass_kinds(rows: Rows) -> frozenset[int]:
    """Return the kinds of passes of a schedule, as indices into `rows.KINDS`."""
    return frozenset(kind for pairs in rows.between for pair in pairs for _, kind, _ in pair.passes)


def _passes(
    kinds: frozenset[int], f: Array, bi: Array, bw: Array, way: Way, gather: Array, away: Array
) -> Array:
    """Return the seconds of F, BI and BW of each block, as (blocks, 3).

    If all backward passes are whole, the column of BI has the seconds of B.
    """
    extra = f if way == AGAIN else np.zeros_like(f)
    moved = away if way == AWAY else np.zeros_like(f)
    forward = _longest(f, moved, gather)
    if BI not in kinds:
        return np.stack([forward, _longest(bi + bw + extra, moved, gather), np.zeros_like(f)], axis=1)
    if B in kinds:
        return np.stack([forward, bi + extra, bw], axis=1)
    return np.stack([forward, _longest(bi + extra, moved, gather), _longest(bw, gather)], axis=1)


def _longest(*columns: Array) -> Array:
    """Return the column with the largest sum over the blocks. A stage's pass takes at least its sum of each
    column, so any of them gives a valid bound."""
    return max(columns, key=lambda column: float(column.sum()))


def _inside(blocks: int, stages: int) -> NDArray[np.bool_]:
    """Return a matrix (blocks, stages): whether the block can be in the stage if no stage is empty."""
    block, stage = np.arange(blocks)[:, None], np.arange(stages)[None]
    found: NDArray[np.bool_] = (stage <= block) & (stages - stage <= blocks - block)
    return found


def _alike(blocks: _Blocks, most: int) -> tuple[Array, _Blocks, Array]:
    """Group the blocks into kinds.

    If there are at most `most` different blocks, each of them is a kind. Otherwise the function groups the
    blocks by their work into at most `KINDS` kinds.

    Returns:
        The number of blocks of each kind, the mean costs of each kind, and a matrix (blocks, kinds) with 1
        where the block has the kind.
    """
    every = np.concatenate([column.reshape(len(blocks.sums), -1) for column in blocks], axis=1)
    scale = every.sum(axis=0)
    rows = list(map(tuple, np.round(every / np.where(scale > 0, scale, 1), 12).tolist()))
    number = {row: k for k, row in enumerate(sorted(set(rows)))}
    kind = np.array([number[row] for row in rows])
    if kind.max() >= most:
        work = blocks.passes[:, 0].sum(axis=1)
        kind = np.searchsorted(np.quantile(work, np.arange(1, KINDS) / KINDS), work)
        kind = np.unique(kind, return_inverse=True)[1].reshape(-1)
    members = np.eye(kind.max() + 1)[kind]
    counts = members.sum(axis=0)
    return (
        counts,
        _Blocks(*(np.tensordot(members / counts, column, axes=([0], [0])) for column in blocks)),
        members,
    )


def _columns(table: Table, kinds: _Blocks, inverse: Array) -> Array:
    """Return the amount that a block of each kind adds to each inequality, as (inequalities, kinds, stages,
    options). Time inequalities come first. `inverse` is 1 / limit of each memory inequality."""
    time = np.einsum("ics,kwc->iksw", table.passes, kinds.passes)
    time += np.einsum("is,kw->iksw", table.sums, kinds.sums)
    time[:, :, 0] += kinds.start
    memory = np.einsum("isw,k->iksw", table.saved, kinds.saved) + np.einsum(
        "isw,k->iksw", table.kept, kinds.kept
    )
    memory += np.einsum("is,ksw->iksw", table.static, kinds.static) + np.einsum(
        "is,ksw->iksw", table.updates, kinds.updated
    )
    return np.concatenate([time, memory * inverse[:, None, None, None]])


def _each(table: Table, blocks: _Blocks, p: Array, q: Array) -> Array:
    """Return the amount that each block adds to the weighted sum of all inequalities, as (blocks, stages,
    options).

    The letters in `einsum` are: c the pass (F, BI, BW), s the stage, k the block, w the option.

    Args:
        table: How often each pass, sum and byte of a stage counts in each inequality.
        blocks: Costs of each block, in seconds and bytes.
        p: Weights of the time inequalities.
        q: Weights of the memory inequalities, in seconds for each byte.
    """
    passes = np.tensordot(p, table.passes, axes=(0, 0))  # (3, stages)
    found: Array = np.einsum("cs,kwc->ksw", passes, blocks.passes)
    found += blocks.sums[:, None] * (p @ table.sums)[:, None]
    found[:, 0] += blocks.start * p.sum()
    found += blocks.saved[:, None, None] * np.tensordot(q, table.saved, axes=(0, 0))
    found += blocks.kept[:, None, None] * np.tensordot(q, table.kept, axes=(0, 0))
    found += blocks.static * (q @ table.static)[:, None] + blocks.updated * (q @ table.updates)[:, None]
    return found


def _weights(
    columns: Array, counts: Array, possible: NDArray[np.bool_], before: Array, enough: float
) -> tuple[Array, Array, Array]:
    """Return weights p, q and u that give a high bound, from a linear program (see the module's docstring).

    Its variables include a value v for each kind, at most the amount that a block adds in any stage with any
    option. It maximizes the bound: the sum of v over all blocks, plus the other terms of the bound. The
    weights p sum to 1 at most.

    Args:
        columns: The result of `_columns`.
        counts: The number of blocks of each kind.
        possible: Whether a block of the kind can be in the stage with the option (kinds, stages, options).
        before: For each time inequality, seconds that do not depend on the blocks.
        enough: Seconds of a bound at which the function stops.
    """
    rows, kinds, stages, _ = columns.shape
    times, constraints = len(before), int(possible.sum())
    scale = float(columns[:times].mean() * counts.sum()) or 1.0
    a = np.zeros((constraints + 2, kinds + rows + stages))
    kind, stage, _ = np.nonzero(possible)
    a[np.arange(constraints), kind] = 1
    a[:-2, kinds : kinds + rows] = -columns[:, possible].T
    a[np.arange(constraints), kinds + rows + stage] = 1
    a[-2, kinds : kinds + times] = 1
    a[-1, kinds + times : kinds + rows] = 1
    small = 1e-7 * scale / float(counts.sum()) * (1 + np.random.default_rng(0).random(constraints))
    gains = np.concatenate([counts, before, -np.ones(rows - times), np.ones(stages)])
    found = _maximized(gains, a, np.append(small, [1, DEAR * scale]), enough * (1 + 1e-4))[kinds:]
    return found[:times], found[times:rows], found[rows:]


def _maximized(gains: Array, a: Array, limits: Array, enough: float) -> Array:
    """Return a vector y >= 0 with a y <= limits and a large `gains` y.

    It takes steps of the simplex method (Dantzig 1951) from y = 0, and so needs limits >= 0. It stops at the
    maximum, when `gains` y reaches `enough`, or after `STEPS` steps.
    """
    # `table` is the simplex tableau, with the limits in the last column and the gains in the last row.
    # `inside` has the variable of each row, and `outside` the variable of each column, which is 0.
    rows, columns = a.shape
    table = np.concatenate([np.concatenate([a, limits[:, None]], axis=1), np.append(gains, 0.0)[None]])
    inside, outside = np.arange(columns, columns + rows), np.arange(columns)
    for _ in range(STEPS):
        j = int(table[-1, :-1].argmax())
        if table[-1, j] <= 1e-12 or -table[-1, -1] >= enough:
            break
        column = table[:-1, j]
        # Increase variable j until variable r becomes 0. Then the two change places.
        ratios = np.divide(table[:-1, -1], column, out=np.full(rows, np.inf), where=column > 1e-11)
        r = int(ratios.argmin())
        if not np.isfinite(ratios[r]):
            break
        pivot = table[r, j]
        old = table[:, j].copy()
        row = table[r] / pivot
        table -= old[:, None] * row
        table[:, j] = -old / pivot
        table[r] = row
        table[r, j] = 1 / pivot
        inside[r], outside[j] = outside[j], inside[r]
    found = np.zeros(columns + rows)
    found[inside] = np.maximum(table[:-1, -1], 0)
    return found[:columns]
