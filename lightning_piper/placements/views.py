"""The dimensions before and after a view that have the same elements, and how a view changes shards."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence

from lightning_piper.ir.values import Sharded


def regrouped(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return pairs of groups: dimensions before a view, and the dimensions after it with the same elements.

    The groups are as small as possible. Dimensions of size 1 are in no group. For example, a view of
    [2, 3, 4] as [6, 4] gives `[((0, 1), (0,)), ((2,), (1,))]`.
    """
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        mine: list[int] = []
        theirs: list[int] = []
        a = b = 1  # number of elements in `mine` and in `theirs`
        while True:
            if a == b and mine and theirs:
                break
            # Extend the group with fewer elements by its next dimension.
            if (a <= b and i < len(before)) or j >= len(after):
                if i >= len(before):
                    break
                if before[i] != 1:
                    mine.append(i)
                    a *= before[i]
                i += 1
            else:
                if after[j] != 1:
                    theirs.append(j)
                    b *= after[j]
                j += 1
        if mine and theirs:
            groups.append((tuple(mine), tuple(theirs)))
    return groups


def regrouping(
    before: Sequence[int], after: Sequence[int], degree: int, blocks: Collection[int]
) -> Iterator[tuple[Sharded, Sharded]]:
    """Yield pairs of a shard before a view and a shard after it, which give each member the same elements.

    A shard of a dimension may become a shard of runs: heads in [samples, heads] become heads of each sample
    in [samples * heads].

    Args:
        before, after: The shapes of the view's input and output.
        degree: The number of members, which divide each run evenly.
        blocks: Numbers of runs for the shard before the view, besides 1.
    """
    for mine, theirs in regrouped(before, after):
        for d in mine:
            for count in (n for n in {1, *blocks} if before[d] % (n * degree) == 0):
                runs = math.prod(before[i] for i in mine if i < d) * count
                length = math.prod(before[i] for i in mine) // runs  # number of elements of a run
                for e in theirs:
                    # the number of elements in the dimensions before `e`, and in the dimensions after it
                    outer, inner = (
                        math.prod(after[i] for i in theirs if side(i, e))
                        for side in (operator.lt, operator.gt)
                    )
                    # Runs of `e` are the same elements as runs of `d`, and each can be divided evenly.
                    if (
                        runs % outer == 0
                        and after[e] * inner * outer == length * runs
                        and length % (inner * degree) == 0
                    ):
                        yield Sharded(d, count), Sharded(e, runs // outer)
