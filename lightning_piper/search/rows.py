"""Schedules by name, as data for the search: the passes of each rank, how many saved values it keeps, and
messages.

This data depends only on the order of the passes, not on their durations. So all candidates with one schedule
and the same numbers of ranks, stages and microbatches share it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import ge
from typing import NamedTuple

from lightning_piper.common.limits import PASSES
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules.searched_schedules import SEARCHED

KINDS = ("F", "B", "BI", "BW")  # in the search, the number of a kind of pass is its index here
F, B, BI, BW = range(4)
_NUMBERS = dict(zip(KINDS, range(4), strict=True))


def rank_of(stage: int, ranks: int, folded: bool) -> int:
    """Return the rank of a stage: round-robin over the ranks, or, if folded, down the ranks and up again.
    With 2 ranks, the ranks of 4 stages are 0, 1, 0, 1, or, if folded, 0, 1, 1, 0."""
    return min(stage, 2 * ranks - 1 - stage) if folded else stage % ranks


def is_possible(name: str, per_rank: int, ranks: int, microbatches: int) -> bool:
    """Return whether the schedule exists for these numbers, with at most `PASSES` forward and backward
    passes. The name must be in `SEARCHED`; `per_rank` is not checked."""
    return 2 * ranks * per_rank * microbatches <= PASSES and SEARCHED[name].exists(ranks, microbatches)


class RankPass(NamedTuple):
    """A pass of a rank.

    Attributes:
        stage, kind: The pass; `kind` is an index into `KINDS`.
        needs: The message that the pass waits for, or -1.
        posts: Messages whose receive the rank starts before this pass, when `needs` has arrived.
        sends: The message that carries the result, or -1.
        complete: Whether this is a B or BW pass, and the rank's next pass is of a different stage or kind.
            Also True for a B or BW that is the rank's last pass.
    """

    stage: int
    kind: int
    needs: int
    posts: tuple[int, ...]
    sends: int
    complete: bool


class Between(NamedTuple):
    """A span of a rank's work from one pass to another, both included.

    Attributes:
        first, last: (stage, kind) of the two passes.
        passes: (stage, kind, how often) of the passes from `first` to `last`.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    passes: tuple[tuple[int, int, int], ...]


# For each stage of a rank: the number of microbatches whose next pass is B or BI, and whose next pass is BW.
Kept = tuple[tuple[int, int], ...]
_Action = tuple[int, int, int]  # stage, kind, microbatch


@dataclass(frozen=True)
class Wires:
    """A list of the passes of a schedule and of the messages between them.

    Attributes:
        steps: The passes of each rank, in order.
        at_once: For each rank, the messages whose receive it starts before its first pass.
        messages: (index of the channel, boundary, receiving rank, index of the receiver's pass that reads it)
            of each message. Boundary b is between the stages b and b + 1.
        channels: Number of channels.
    """

    steps: tuple[tuple[RankPass, ...], ...]
    at_once: tuple[tuple[int, ...], ...]
    messages: tuple[tuple[int, int, int, int], ...]
    channels: int


@dataclass(frozen=True)
class Rows:
    """A schedule of `stages` stages on `ranks` ranks, as bounds and memory estimates need it.

    Attributes:
        key: Name, stages on each rank, ranks, and microbatches.
        rank: The rank of each stage.
        local: The stages of each rank.
        between: Spans of work of each rank; see `Between`.
        kept: The largest memory states of each rank: the stage whose B or BI runs (-1: a BW runs), and the
            `Kept` of the rank.
    """

    key: tuple[str, int, int, int]
    ranks: int
    stages: int
    rank: tuple[int, ...]
    local: tuple[tuple[int, ...], ...]
    between: tuple[tuple[Between, ...], ...]
    kept: tuple[tuple[tuple[int, Kept], ...], ...]

    @property
    def wires(self) -> Wires:
        """The passes and messages. `Rows` does not keep them, because they need much memory."""
        return wires_of(*self.key)


@functools.lru_cache(maxsize=2048)
def rows_of(name: str, per_rank: int, ranks: int, microbatches: int) -> Rows:
    """Return the rows of a schedule, in time linear in its passes. The result is cached.

    Raises:
        DirectiveError: The schedule does not exist for these numbers.
    """
    actions = _actions(name, per_rank, ranks, microbatches)
    local = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in actions)
    rank = {stage: r for r, own in enumerate(local) for stage in own}
    kept = tuple(_kept(row, own) for row, own in zip(actions, local, strict=True))
    key, stages = (name, per_rank, ranks, microbatches), ranks * per_rank
    return Rows(
        key, ranks, stages, tuple(rank[s] for s in range(stages)), local, tuple(map(_between, actions)), kept
    )


@functools.lru_cache(maxsize=16)
def wires_of(name: str, per_rank: int, ranks: int, microbatches: int) -> Wires:
    """Return the passes of a schedule and the messages between them, in time linear in its passes. The last
    16 results are cached.

    Raises:
        DirectiveError: The schedule does not exist for these numbers.
    """
    return _wires(_actions(name, per_rank, ranks, microbatches), ranks * per_rank)


def _actions(name: str, per_rank: int, ranks: int, microbatches: int) -> list[list[_Action]]:
    """Return the passes of each rank in order. Passes that may overlap come one after the other.

    Raises:
        DirectiveError: The schedule does not exist for these numbers.
    """
    if name not in SEARCHED:
        raise DirectiveError(
            f"search: unknown schedule {name!r}. Give one of {', '.join(SEARCHED)} [PIPER-D020]"
        )
    if per_rank not in SEARCHED[name].per_rank or not is_possible(name, per_rank, ranks, microbatches):
        raise DirectiveError(
            f"{name}: no such schedule for {ranks} ranks with {per_rank} stages each and {microbatches} "
            f"microbatches. Give numbers that the builder piper.schedules.{name} accepts [PIPER-D020]"
        )
    rows = SEARCHED[name].rows(ranks, microbatches, per_rank)
    return [[(stage, _NUMBERS[kind], mb) for group in row for stage, kind, mb in group] for row in rows]


def _wires(actions: Sequence[Sequence[_Action]], stages: int) -> Wires:
    """Number the messages between stages on different ranks. Return the messages and the passes. A pass has
    the message that it waits for, the message that it sends, and the messages whose receives start with
    it."""
    rank = {stage: r for r, row in enumerate(actions) for stage, _, _ in row}
    # (0 for forward or 1 for backward, reading stage, microbatch) -> (message, boundary).
    made: dict[tuple[int, int, int], tuple[int, int]] = {}
    queues: dict[tuple[int, int], list[int]] = {}  # channel -> its messages, in the order of their sends
    messages: list[tuple[int, int, int]] = []  # channel, boundary, receiver
    for r, row in enumerate(actions):
        for stage, kind, mb in row:
            to = stage + 1 if kind == F else stage - 1
            if kind != BW and 0 <= to < stages and rank[to] != r:
                number = made[int(kind != F), to, mb] = (len(messages), min(stage, to))
                channel = queues.setdefault((r, rank[to]), [])
                index = messages[channel[0]][0] if channel else len(queues) - 1
                messages.append((index, number[1], rank[to]))
                channel.append(number[0])
    at: list[int] = [0] * len(messages)  # message -> index of the pass that reads it
    for row in actions:
        for position, (stage, kind, mb) in enumerate(row):
            if kind != BW and (int(kind != F), stage, mb) in made:
                at[made[int(kind != F), stage, mb][0]] = position
    posts = _posts(at, queues, messages)
    steps, at_once = [], []
    for r, row in enumerate(actions):
        found, at_start = posts.get(r, ({}, ()))
        at_once.append(at_start)
        steps.append(tuple(_step(row, p, stages, made, rank, found.get(p, ())) for p in range(len(row))))
    full = tuple((channel, border, to, at[m]) for m, (channel, border, to) in enumerate(messages))
    return Wires(tuple(steps), tuple(at_once), full, len(queues))


def _step(
    row: Sequence[_Action],
    p: int,
    stages: int,
    made: dict[tuple[int, int, int], tuple[int, int]],
    rank: dict[int, int],
    posts: tuple[int, ...],
) -> RankPass:
    """Return pass p of a row, with its messages.

    Args:
        row: The passes of the rank.
        p: The index of the pass.
        stages: The number of stages.
        made: (0 for forward or 1 for backward, reading stage, microbatch) -> (message, boundary).
        rank: Stage -> rank.
        posts: Messages whose receive starts before the pass.
    """
    stage, kind, mb = row[p]
    needs = made.get((int(kind != F), stage, mb), (-1, 0))[0] if kind != BW else -1
    to = stage + 1 if kind == F else stage - 1
    sends = (
        made[int(kind != F), to, mb][0] if kind != BW and 0 <= to < stages and rank[to] != rank[stage] else -1
    )
    complete = kind in (B, BW) and (p + 1 == len(row) or row[p + 1][:2] != (stage, kind))
    return RankPass(stage, kind, needs, posts, sends, complete)


def _posts(
    at: Sequence[int], queues: dict[tuple[int, int], list[int]], messages: Sequence[tuple[int, int, int]]
) -> dict[int, tuple[dict[int, tuple[int, ...]], tuple[int, ...]]]:
    """Return where each rank starts its receives: rank -> (index of a pass -> messages, messages before the
    first pass). Ranks without receives are absent.

    If pass p reads a message, the receive starts with pass p - 1. It starts earlier if a later message of the
    same channel is read earlier, because the receives of a channel start in the order of its sends; see
    `plan.irecv`. The receive of a message for pass 0 starts before the first pass.

    Args:
        at: Message -> index of the pass that reads it.
        queues: Channel (sending rank, receiving rank) -> its messages, in the order of their sends.
        messages: (channel, boundary, receiving rank) of each message.
    """
    found: dict[int, tuple[dict[int, tuple[int, ...]], tuple[int, ...]]] = {}
    for queue in queues.values():
        limit = len(at) + 1
        receiver = messages[queue[0]][2]
        by_step, first = found.get(receiver, ({}, ()))
        for message in reversed(queue):
            limit = min(limit, at[message] - 1)
            if limit < 0:
                first = (message, *first)
            else:
                by_step[limit] = (message, *by_step.get(limit, ()))
        found[receiver] = (by_step, first)
    return found


def _between(row: Sequence[_Action]) -> tuple[Between, ...]:
    """Return the spans of a rank for which `bounds` computes bounds.

    The spans run from the first pass, or the first backward pass, to the last pass, or the last pass that
    makes gradients of inputs. Further spans run from the first pass of each stage to its last pass that makes gradients
    of inputs: they know the bubble of interleaved stages.
    """
    passes = [(stage, kind) for stage, kind, _ in row]
    backward = [p for p, (_, kind) in enumerate(passes) if kind in (B, BI)]
    every, found = Counter(passes), []
    starts, ends = (dict.fromkeys(pair) for pair in ((0, backward[0]), (len(row) - 1, backward[-1])))
    first_of = {stage: p for p, (stage, kind) in reversed([*enumerate(passes)]) if kind == F}
    last_of = {passes[p][0]: p for p in backward}
    for first, last in dict.fromkeys(
        (*product(starts, ends), *((first_of[s], last_of[s]) for s in first_of))
    ):
        count = every - Counter(passes[:first]) - Counter(passes[last + 1 :])
        own = tuple((stage, kind, n) for (stage, kind), n in sorted(count.items()))
        found.append(Between(passes[first], passes[last], own))
    return tuple(found)


def _kept(row: Sequence[_Action], local: Sequence[int]) -> tuple[tuple[int, Kept], ...]:
    """Return the memory states of a rank while its backward passes run (`Rows.kept`), the largest first.
    Leave out each state in which the rank never needs more memory than in a different state.

    States during an F do not count, because the rank keeps more after the F.
    """
    index_of = {stage: k for k, stage in enumerate(local)}
    now = [0] * (2 * len(local))
    states: dict[tuple[int, tuple[int, ...]], None] = {}
    for stage, kind, _ in row:
        own = 2 * index_of[stage]
        if kind == F:
            now[own] += 1
            continue
        states[-1 if kind == BW else stage, tuple(now)] = None
        if kind == BW:
            now[own + 1] -= 1
        else:
            now[own] -= 1
            now[own + 1] += kind == BI
    largest: list[tuple[int, tuple[int, ...]]] = []
    for runs, state in sorted(states, key=lambda s: -sum(s[1])):
        if not any((runs == -1 or runs == other) and all(map(ge, more, state)) for other, more in largest):
            largest.append((runs, state))
    return tuple((runs, tuple(zip(state[::2], state[1::2], strict=True))) for runs, state in largest)


def decisive_states(states: Iterable[tuple[int, Kept]]) -> list[tuple[int, Kept]]:
    """Return the memory states of one stage in which it can need most, whatever the bytes of a microbatch are
    (`saved_bytes`).

    The bytes are a sum over the two numbers of a state. So only corners of the convex hull of the states count, for
    each stage that runs. Of offloaded values, at most two microbatches count, so also the states with the largest second
    number for 0, 1 and 2 microbatches are decisive.
    """
    found: dict[tuple[int, Kept], None] = {}
    by_runs: dict[int, list[tuple[int, int]]] = {}
    for runs, (numbers,) in states:
        by_runs.setdefault(runs, []).append(numbers)
    for runs, points in by_runs.items():
        corners: list[tuple[int, int]] = []
        for point in sorted(points):
            while len(corners) > 1 and _is_below(corners[-2], corners[-1], point):
                corners.pop()
            corners.append(point)
        offloaded = {min(a, 2): (a, w) for a, w in sorted(points, key=lambda point: point[1])}
        found |= dict.fromkeys((runs, (point,)) for point in (*corners, *offloaded.values()))
    return list(found)


def _is_below(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Return whether the middle point of three is not above the line through the first and the last point."""
    (a, w), (b, x), (c, y) = left, middle, right
    return (x - w) * (c - a) <= (y - w) * (b - a)
