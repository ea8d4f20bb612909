"""V-Min and V-Half: two stages a rank, placed along a V, with less memory than 1F1B.

A microbatch occupies each rank at six moments: F, BI and BW of both stages of the rank. These moments, the building block, move
by a fixed step from rank to rank, and the next microbatch has the same ones six units of time later. No two moments of a rank
differ by a multiple of six, so blocks never collide. How long a block is decides how many of them are alive at a time, so the steps
decide the memory. The rows are the blocks in the order of their time; they run as soon as what they read is there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lightning_piper.directives import Directive
from lightning_piper.schedules.actions import Action, Devices, Row, counts, one_by_one, program_of, ranks_of

PERIOD = 6  # F, BI and BW of two stages, each one unit of time


class _Line(NamedTuple):
    """When a pass of a microbatch begins: on rank 0, and how much later on each next one."""

    begin: int
    step: int


class _Block(NamedTuple):
    """Of the first microbatch: the stage of the way down the V, forward and backward, and that of the way up."""

    down_forward: _Line
    up_forward: _Line
    up_backward: _Line
    down_backward: _Line


def v_min(stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB") -> list[Directive]:
    """Rank r of R has the stages r and 2R - 1 - r, and keeps about a third of the activations of 1F1B.

    If F, BI and BW take equally long, a rank keeps those of at most 2 floor((R + 4) / 3) microbatches of one stage (1F1B: 2R of
    stages of this size), and has a bubble of 4R - 5 such passes, up to two more if 3 divides R (1F1B: 6(R - 1)). Other times may
    make longer gaps, for the blocks are tight.

    Args:
        stages: number of indices of `tag`, even.
        microbatches: pieces of the batch, tagged `dim_name`.
        devices: of each rank, as for `gpipe`.

    Raises:
        DirectiveError: a count below one, an odd number of stages, or not one device (or group) a rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv 2405.15362).
    """
    return _program("v_min", stages, microbatches, devices, tag, dim_name)


def v_half(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """Rank r of R has the stages r and 2R - 1 - r, and keeps about half of the activations of 1F1B.

    If F, BI and BW take equally long, a rank keeps those of at most 2 floor((R + 2) / 2) microbatches of one stage (1F1B: 2R of
    stages of this size), and has a bubble of at most 3R such passes (1F1B: 6(R - 1)) on up to 17 ranks; on more it grows somewhat
    faster. Arguments and errors as for `v_min`.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv 2405.15362). The memory is the paper's; the steps
    of the block are this package's own.
    """
    return _program("v_half", stages, microbatches, devices, tag, dim_name)


def _program(name: str, stages: int, microbatches: int, devices: Devices | None, tag: str, dim_name: str) -> list[Directive]:
    stages, microbatches = counts(name, stages=stages, microbatches=microbatches)
    return program_of(v_rows(name, ranks_of(name, stages, 2), microbatches), microbatches, devices, tag, dim_name, name)


def v_rows(name: str, ranks: int, microbatches: int) -> list[Row]:
    """What the ranks do one after the other in `v_min` or `v_half`."""
    block = _v_min(ranks) if name == "v_min" else _v_half(ranks)
    return [one_by_one(*row) for row in _cooled_down([_row(block, ranks, rank, microbatches) for rank in range(ranks)])]


def _v_min(ranks: int) -> _Block:
    """Every step is one. Forward and backward passes of one direction have the same parity on all ranks, so that those of the other
    direction never meet them."""
    turn = 2 * ranks + (0 if ranks % 3 else 2)  # no multiple of six: there the first F is
    return _Block(_Line(0, 1), _Line(2 * ranks - 1, -1), _Line(turn, 1), _Line(turn + 2 * ranks - 1, -1))


def _v_half(ranks: int) -> _Block:
    """Ways down take one unit a rank, ways up two: six for the whole block, where V-Min has four."""
    even = ranks % 2 == 0
    up = 3 * ranks + (1 if even else -1)
    return _Block(_Line(0, 1), _Line(up, -2), _Line(up + 1, 1), _Line(6 * ranks + (4 if even else -2), -2))


def _row(block: _Block, ranks: int, rank: int, microbatches: int) -> list[Action]:
    """All actions of a rank by time. BW takes the next free moment behind its BI."""
    down, up = rank, 2 * ranks - 1 - rank
    moments = [line.begin + line.step * rank for line in block]
    taken = {moment % PERIOD for moment in moments}
    for moment in moments[2:]:
        free = next(t for t in range(moment + 1, moment + 1 + PERIOD) if t % PERIOD not in taken)
        taken.add(free % PERIOD)
        moments.append(free)
    work = sorted(zip(moments, [(down, "F"), (up, "F"), (up, "BI"), (down, "BI"), (up, "BW"), (down, "BW")], strict=True))
    timed = ((moment + PERIOD * mb, Action(*what, mb)) for mb in range(microbatches) for moment, what in work)
    return [action for _, action in sorted(timed)]


class _Waiting:
    """What a rank has yet to do. From its last F on, a BW runs only where no BI can: nothing is kept for later any more."""

    def __init__(self, row: list[Action]) -> None:
        last = max(i for i, action in enumerate(row) if action.kind == "F")
        self._steady = deque(row[: last + 1])
        self._rest = [deque(action for action in row[last + 1 :] if action.kind == kind) for kind in ("BI", "BW")]

    def next(self, end: dict[Action, int], time: int, stages: int) -> Action | None:
        """Taken out: what it can do at this time."""
        for queue in [self._steady] if self._steady else self._rest:
            if queue and all(end.get(source, time + 1) <= time for source in _sources(queue[0], stages)):
                return queue.popleft()
        return None

    def __bool__(self) -> bool:
        return bool(self._steady or any(self._rest))


def _cooled_down(rows: list[list[Action]]) -> list[list[Action]]:
    """The rows with their last backward passes in the order in which they can run, if each pass takes one unit of time."""
    waiting = [_Waiting(row) for row in rows]
    done: list[list[Action]] = [[] for _ in rows]
    end: dict[Action, int] = {}
    time = 0
    while any(waiting):
        now = [(row, action) for row, rank in zip(done, waiting, strict=True) if (action := rank.next(end, time, 2 * len(rows)))]
        time += 1
        for row, action in now:
            row.append(action)
            end[action] = time
    return done


def _sources(action: Action, stages: int) -> list[Action]:
    stage, kind, mb = action
    if kind == "BW":
        return [Action(stage, "BI", mb)]
    before = [Action(stage, "F", mb)] if kind == "BI" else []
    neighbour = stage - 1 if kind == "F" else stage + 1
    return [*before, Action(neighbour, kind, mb)] if 0 <= neighbour < stages else before
