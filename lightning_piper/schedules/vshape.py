"""V-Min and V-Half: two stages on each rank, placed along a V, with less memory than 1F1B.

A microbatch occupies each rank at six moments: F, BI and BW of both stages of the rank. These moments form
the building block. They shift by a fixed step from rank to rank, and by six units of time from one microbatch
to the next. No two moments of a rank differ by a multiple of six, so blocks never collide. The length of a
block determines how many blocks are alive at a time, so the steps determine the memory. The rows list the
passes of all blocks in the order of their time. At run time a pass starts when its inputs have arrived.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lightning_piper.directives import Directive
from lightning_piper.schedules.actions import (
    Action,
    Devices,
    Row,
    checked_counts,
    one_by_one,
    program_of,
    ranks_of,
)
from lightning_piper.schedules.searched_schedules import searched

PERIOD = 6  # F, BI and BW of two stages, each one unit of time


class _Line(NamedTuple):
    """The starts of one pass of the first microbatch on all ranks.

    Attributes:
        begin: The start on rank 0.
        step: The start on the next rank minus the start on a rank.
    """

    begin: int
    step: int


class _FirstMicrobatch(NamedTuple):
    """The F and BI of the first microbatch: of the stages on the way from rank 0 to the last rank (down), and
    of the stages on the way back (up). `_row` adds the BW.
    """

    down_forward: _Line
    up_forward: _Line
    up_backward: _Line
    down_backward: _Line


@searched(
    lambda ranks, microbatches, _: v_rows("v_min", ranks, microbatches),
    per_rank=(2,),
    folded=True,
    split=True,
)
def v_min(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """V-Min: rank r of R has the stages r and 2R - 1 - r, and holds about a third of the activations of 1F1B.

    If F, BI and BW take equally long, a rank holds the activations of at most 2 floor((R + 4) / 3)
    microbatches of one stage. With stages of this size, 1F1B holds the activations of 2R microbatches. The
    bubble is 4R - 5 passes, or up to two passes more if 3 divides R. The bubble of 1F1B is 6(R - 1) passes.
    If times are unequal, gaps may be longer, because passes of a block follow each other closely.

    Args:
        stages: The number of stages, which is even. Their tag is `tag`.
        microbatches: The number of microbatches; their tag is `dim_name`.
        devices: The devices of each rank, as for `gpipe`.
        tag, dim_name: The tags of stages and microbatches.

    Raises:
        DirectiveError: A count is below one, the step would have too many passes, or a tag is not valid. Or
            the number of stages is odd, or `devices` does not have one device (or group) for each rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv 2405.15362).
    """
    return _program("v_min", stages, microbatches, devices, tag, dim_name)


@searched(
    lambda ranks, microbatches, _: v_rows("v_half", ranks, microbatches),
    per_rank=(2,),
    folded=True,
    split=True,
)
def v_half(
    stages: int, microbatches: int, devices: Devices | None = None, tag: str = "PP", dim_name: str = "MB"
) -> list[Directive]:
    """V-Half: rank r of R has the stages r and 2R - 1 - r, and holds about half of the activations of 1F1B.

    If F, BI and BW take equally long, a rank holds the activations of at most 2 floor((R + 2) / 2)
    microbatches of one stage. With stages of this size, 1F1B holds the activations of 2R microbatches. The
    bubble is at most 3R passes on up to 17 ranks, and grows somewhat faster on more ranks. The bubble of 1F1B
    is 6(R - 1) passes. See `v_min` for arguments and errors.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv 2405.15362). The memory is
    the paper's; the steps of the block are this package's own.
    """
    return _program("v_half", stages, microbatches, devices, tag, dim_name)


def _program(
    name: str, stages: int, microbatches: int, devices: Devices | None, tag: str, dim_name: str
) -> list[Directive]:
    stages, microbatches = checked_counts(name, stages=stages, microbatches=microbatches)
    return program_of(
        v_rows(name, ranks_of(name, stages, 2), microbatches), microbatches, devices, tag, dim_name, name
    )


def v_rows(name: str, ranks: int, microbatches: int) -> list[Row]:
    """Return the rows of the builder `name`: "v_min" or "v_half"."""
    block = _v_min(ranks) if name == "v_min" else _v_half(ranks)
    return [
        one_by_one(*row)
        for row in _cooled_down([_row(block, ranks, rank, microbatches) for rank in range(ranks)])
    ]


def _v_min(ranks: int) -> _FirstMicrobatch:
    """Return the block of V-Min, in which every step is 1 or -1.

    The starts of `down_forward` and `up_backward` have the parity of the rank, and the starts of `up_forward`
    and `down_backward` have the other parity. So a pass of the first two kinds never collides with a pass of
    the last two.
    """
    turn = 2 * ranks + (0 if ranks % 3 else 2)  # not a multiple of PERIOD, or up_backward collides with F
    return _FirstMicrobatch(
        _Line(0, 1), _Line(2 * ranks - 1, -1), _Line(turn, 1), _Line(turn + 2 * ranks - 1, -1)
    )


def _v_half(ranks: int) -> _FirstMicrobatch:
    """Return the block of V-Half.

    Passes that go from rank 0 to the last rank start one unit of time later on each rank. Passes that go back
    to rank 0 start two units later on each rank. The whole block takes about six units for each rank, and the
    block of V-Min four.
    """
    even = ranks % 2 == 0
    up = 3 * ranks + (1 if even else -1)
    return _FirstMicrobatch(
        _Line(0, 1), _Line(up, -2), _Line(up + 1, 1), _Line(6 * ranks + (4 if even else -2), -2)
    )


def _row(block: _FirstMicrobatch, ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Return all actions of a rank in order of time. Each BW takes the next free moment after its BI."""
    down, up = rank, 2 * ranks - 1 - rank
    moments = [line.begin + line.step * rank for line in block]
    taken = {moment % PERIOD for moment in moments}
    for moment in moments[2:]:
        free = next(t for t in range(moment + 1, moment + 1 + PERIOD) if t % PERIOD not in taken)
        taken.add(free % PERIOD)
        moments.append(free)
    work = sorted(
        zip(
            moments, [(down, "F"), (up, "F"), (up, "BI"), (down, "BI"), (up, "BW"), (down, "BW")], strict=True
        )
    )
    timed = ((moment + PERIOD * mb, Action(*what, mb)) for mb in range(microbatches) for moment, what in work)
    return [action for _, action in sorted(timed)]


class _RemainingPasses:
    """The passes of a rank that have not run. Up to the last F their order is fixed. After the last F, the
    rank runs a BW only if it cannot run a BI."""

    def __init__(self, row: list[Action]) -> None:
        last = max(i for i, action in enumerate(row) if action.kind == "F")
        self._steady = deque(row[: last + 1])
        self._rest = [
            deque(action for action in row[last + 1 :] if action.kind == kind) for kind in ("BI", "BW")
        ]

    def next(self, end: dict[Action, int], time: int, stages: int) -> Action | None:
        """Remove and return the pass that the rank runs at `time`, or return None if no pass can run. `end`
        has the end of each pass that has run."""
        for queue in [self._steady] if self._steady else self._rest:
            if queue and all(end.get(source, time + 1) <= time for source in _sources(queue[0], stages)):
                return queue.popleft()
        return None

    def __bool__(self) -> bool:
        return bool(self._steady or any(self._rest))


def _cooled_down(rows: list[list[Action]]) -> list[list[Action]]:
    """Return the rows with a new order of the passes after the last F of each row. It is the order in which
    these passes can run if each pass takes one unit of time.
    """
    waiting = [_RemainingPasses(row) for row in rows]
    done: list[list[Action]] = [[] for _ in rows]
    end: dict[Action, int] = {}
    time = 0
    while any(waiting):
        now = [
            (row, action)
            for row, rank in zip(done, waiting, strict=True)
            if (action := rank.next(end, time, 2 * len(rows)))
        ]
        time += 1
        for row, action in now:
            row.append(action)
            end[action] = time
    return done


def _sources(action: Action, stages: int) -> list[Action]:
    """Return the passes whose results a pass reads."""
    stage, kind, mb = action
    if kind == "BW":
        return [Action(stage, "BI", mb)]
    before = [Action(stage, "F", mb)] if kind == "BI" else []
    neighbor = stage - 1 if kind == "F" else stage + 1
    return [*before, Action(neighbor, kind, mb)] if 0 <= neighbor < stages else before
