"""A bound of whole layouts, however blocks are cut, from what all ranks have to do together.

`bounds` says of each rank: head + work of the passes between + tail <= time. Heads, work and tails are sums over stages of how
often a pass of the stage counts. So any weights of these inequalities, 1 together, give one more, in which a pass of a stage counts
as often as it does in their mean. Wherever a block lies, it adds no less than in the stage where it adds least:

    time >= sum over blocks of the least over stages of  forward n_F + backward_input n_BI + backward_weights n_BW

That holds for any weights. The best ones are the first player's in a game in which the second one puts the work into the stage
where it counts least; multiplicative weights come close to them (Freund and Schapire 1999).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_piper.search.rows import BI, BW, SHAPES, B, F, rows_of

ROUNDS = 200  # of the game
_ROUNDING = 1 - 1e-9  # sums of a few thousand doubles are closer than that
Array = NDArray[np.float64]
Key = tuple[str, int, int, int]  # schedule, stages on each rank, ranks, microbatches


def shares(key: Key, work: Sequence[tuple[float, float, float]]) -> float:
    """Seconds of a step, at least.

    Args:
        key: of the schedule.
        work: of each block, seconds of F, BI and BW on one microbatch.
    """
    blocks = np.array(work, dtype=np.float64)
    total = blocks.sum(axis=0)
    scale = total.sum()
    if not scale > 0:
        return 0.0
    mean = tuple(round(float(x), 2) for x in total / scale)
    return float((blocks @ _mean(key, mean)).min(axis=1).sum()) * _ROUNDING


@functools.lru_cache(maxsize=4096)
def _mean(key: Key, work: tuple[float, float, float]) -> Array:
    """How often F, BI and BW of each stage count (3, stages), by weights that suit work in these proportions."""
    counts = _counts(key)
    game = np.tensordot(counts, np.array(work), axes=([1], [0]))  # (inequalities, stages)
    size = float(game.max())
    gains, played = np.zeros(len(game)), np.zeros(len(game))
    rate = np.sqrt(8 * np.log(len(game) + 1) / ROUNDS)
    best, weights = -1.0, np.full(len(game), 1 / len(game))
    for _ in range(ROUNDS):
        now = np.exp(rate * (gains - gains.max()))
        played += now / now.sum()
        mean = played / played.sum()
        value = float((mean @ game).min())
        if value > best:
            best, weights = value, mean
        gains = gains + game[:, int(((now / now.sum()) @ game).argmin())] / size
    found: Array = np.tensordot(weights, counts, axes=([0], [0]))
    return found


def _counts(key: Key) -> Array:
    """How often F, BI and BW of each stage count in each inequality (inequalities, 3, stages)."""
    rows, split = rows_of(*key), SHAPES[key[0]].split
    pairs = [pair for pairs in rows.between for pair in pairs]
    counts = np.zeros((len(pairs), 3, rows.stages))
    back = slice(1, 2) if split else slice(1, 3)  # what other stages wait for
    for row, ((first, kind), (last, ends), passes) in zip(counts, pairs, strict=True):
        if kind == F:
            row[0, :first] += 1
        else:
            row[0] += 1
            row[back, first + 1 :] += 1
        for stage, which, n in passes:
            row[_PARTS[which], stage] += n
        if ends != BW:
            row[back, :last] += 1
    return counts


_PARTS = {F: slice(0, 1), B: slice(1, 3), BI: slice(1, 2), BW: slice(2, 3)}
