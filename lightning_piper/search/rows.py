"""Schedules by name, as what a search asks of them: who runs what after what, what is kept meanwhile, and who sends to whom.

All of it follows from the order of the passes alone, not from how long they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ge
from typing import NamedTuple

from lightning_piper.errors import DirectiveError
from lightning_piper.limits import PASSES
from lightning_piper.schedules.actions import Row
from lightning_piper.schedules.dualpipe import dualpipev_rows
from lightning_piper.schedules.interleaved import interleaved_rows
from lightning_piper.schedules.pipeline import gpipe_rows, one_f_one_b_rows, zb_h2_rows, zero_bubble_rows
from lightning_piper.schedules.vshape import v_rows
from lightning_piper.schedules.zbv import zbv_rows

KINDS = ("F", "B", "BI", "BW")  # in this order wherever passes are numbered
F, B, BI, BW = range(4)


class Shape(NamedTuple):
    """Of a schedule: stages on each rank (the numbers that are tried), whether they lie along a V, whether it splits backward
    passes."""

    per_rank: tuple[int, ...]
    folded: bool
    split: bool


SHAPES = {
    "gpipe": Shape((1,), False, False),
    "one_f_one_b": Shape((1,), False, False),
    "zero_bubble": Shape((1,), False, True),
    "interleaved_one_f_one_b": Shape((2, 3, 4, 5, 6, 7, 8), False, False),
    "zb_h2": Shape((1,), False, True),
    "zbv": Shape((2,), True, True),
    "v_half": Shape((2,), True, True),
    "v_min": Shape((2,), True, True),
    "dualpipev": Shape((2,), True, True),
}

_BUILDERS: dict[str, Callable[[int, int, int], list[Row]]] = {  # of stages on each rank, ranks, and microbatches
    "gpipe": lambda _, ranks, m: gpipe_rows(ranks, m),
    "one_f_one_b": lambda _, ranks, m: one_f_one_b_rows(ranks, m),
    "zero_bubble": lambda _, ranks, m: zero_bubble_rows(ranks, m),
    "interleaved_one_f_one_b": lambda each, ranks, m: interleaved_rows(ranks, m, each),
    "zb_h2": lambda _, ranks, m: zb_h2_rows(ranks, m),
    "zbv": lambda _, ranks, m: zbv_rows(ranks, m),
    "v_half": lambda _, ranks, m: v_rows("v_half", ranks, m),
    "v_min": lambda _, ranks, m: v_rows("v_min", ranks, m),
    "dualpipev": lambda _, ranks, m: dualpipev_rows(ranks, m),
}


def rank_of(stage: int, ranks: int, folded: bool) -> int:
    """Round the ranks again and again, or down and up again."""
    return min(stage, 2 * ranks - 1 - stage) if folded else stage % ranks


def is_possible(name: str, per_rank: int, ranks: int, microbatches: int) -> bool:
    """Does the schedule exist for these numbers? One rank alone is served by `gpipe` and `one_f_one_b`."""
    if 2 * ranks * per_rank * microbatches > PASSES:
        return False
    if name == "interleaved_one_f_one_b":
        return ranks > 1 and microbatches % max(1, microbatches // ranks) == 0
    if name == "dualpipev":
        return ranks > 1 and microbatches >= 2 * ranks
    return ranks > 1 or name in ("gpipe", "one_f_one_b")


class Step(NamedTuple):
    """One pass of a rank.

    Attributes:
        stage, kind: which pass; `kind` is an index of `KINDS`.
        needs: the message that it waits for, or -1.
        posts: messages for which the rank is ready from here on, once `needs` has come.
        sends: the message that its result is, or -1.
        complete: it is the last of several passes in a row that make gradients of the same stage.
    """

    stage: int
    kind: int
    needs: int
    posts: tuple[int, ...]
    sends: int
    complete: bool


class Between(NamedTuple):
    """What a rank does from one pass to another, both included: (stage, kind) of either, and (stage, kind, how often) of all."""

    first: tuple[int, int]
    last: tuple[int, int]
    passes: tuple[tuple[int, int, int], ...]


Kept = tuple[tuple[int, int], ...]  # of each stage of a rank: microbatches that wait for B or BI, and those that wait for BW
_Action = tuple[int, int, int]  # stage, kind, microbatch


@dataclass(frozen=True)
class Wires:
    """The passes of a schedule, and the messages between them.

    Attributes:
        steps: of each rank, one after the other.
        at_once: of each rank, the messages for which it is ready before its first pass.
        messages: of each message: channel (an index), border (of stages b and b + 1), receiver, and its step there.
        channels: how many there are.
    """

    steps: tuple[tuple[Step, ...], ...]
    at_once: tuple[tuple[int, ...], ...]
    messages: tuple[tuple[int, int, int, int], ...]
    channels: int


@dataclass(frozen=True)
class Rows:
    """A schedule of `stages` stages on `ranks` ranks: what bounds and bytes need to know of it.

    Attributes:
        key: its name, stages on each rank, ranks, and microbatches.
        rank: of each stage.
        local: stages of each rank.
        between: of each rank; see `Between`.
        kept: of each rank, the largest states of what is kept: (stage whose backward pass runs, or -1; what is kept).
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
        """Made when it is asked for: it is much larger than the rest, and few candidates come so far."""
        return wires_of(*self.key)


@functools.lru_cache(maxsize=2048)
def rows_of(name: str, per_rank: int, ranks: int, microbatches: int) -> Rows:
    """The rows of a schedule. Linear in its passes.

    Raises:
        DirectiveError: the schedule does not exist for these numbers.
    """
    actions = _actions(name, per_rank, ranks, microbatches)
    rank = {stage: r for r, row in enumerate(actions) for stage, _, _ in row}
    local = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in actions)
    kept = tuple(_kept(row, own) for row, own in zip(actions, local, strict=True))
    key, stages = (name, per_rank, ranks, microbatches), ranks * per_rank
    return Rows(key, ranks, stages, tuple(rank[s] for s in range(stages)), local, tuple(map(_between, actions)), kept)


@functools.lru_cache(maxsize=16)
def wires_of(name: str, per_rank: int, ranks: int, microbatches: int) -> Wires:
    """The passes of a schedule, and the messages between them. Linear in its passes."""
    return _wires(_actions(name, per_rank, ranks, microbatches), ranks * per_rank)


def _actions(name: str, per_rank: int, ranks: int, microbatches: int) -> list[list[_Action]]:
    """What each rank runs. Passes that may overlap stand one after the other.

    Raises:
        DirectiveError: the schedule does not exist for these numbers.
    """
    if name not in SHAPES:
        raise DirectiveError(f"schedule {name!r} is not known; give one of {', '.join(SHAPES)}")
    if per_rank not in SHAPES[name].per_rank or not is_possible(name, per_rank, ranks, microbatches):
        raise DirectiveError(f"{name}: {ranks} ranks with {per_rank} stages each and {microbatches} microbatches; see its builder")
    rows = _BUILDERS[name](per_rank, ranks, microbatches)
    return [[(stage, KINDS.index(kind), mb) for group in row for stage, kind, mb in group] for row in rows]


def _wires(actions: Sequence[Sequence[_Action]], stages: int) -> Wires:
    rank = {stage: r for r, row in enumerate(actions) for stage, _, _ in row}
    made: dict[tuple[int, int, int], tuple[int, int]] = {}  # forward (0) or not (1), stage, microbatch -> message, border
    queues: dict[tuple[int, int], list[int]] = {}  # channel -> its messages, as they are sent
    messages: list[tuple[int, int, int]] = []  # channel, border, receiver
    for r, row in enumerate(actions):
        for stage, kind, mb in row:
            to = stage + 1 if kind == F else stage - 1
            if kind != BW and 0 <= to < stages and rank[to] != r:
                number = made[int(kind != F), to, mb] = (len(messages), min(stage, to))
                channel = queues.setdefault((r, rank[to]), [])
                index = messages[channel[0]][0] if channel else len(queues) - 1
                messages.append((index, number[1], rank[to]))
                channel.append(number[0])
    at: list[int] = [0] * len(messages)
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
    row: Sequence[_Action], p: int, stages: int, made: dict[tuple[int, int, int], tuple[int, int]],
    rank: dict[int, int], posts: tuple[int, ...],
) -> Step:  # fmt: skip
    stage, kind, mb = row[p]
    needs = made.get((int(kind != F), stage, mb), (-1, 0))[0] if kind != BW else -1
    to = stage + 1 if kind == F else stage - 1
    sends = made[int(kind != F), to, mb][0] if kind != BW and 0 <= to < stages and rank[to] != rank[stage] else -1
    complete = kind in (B, BW) and (p + 1 == len(row) or row[p + 1][:2] != (stage, kind))
    return Step(stage, kind, needs, posts, sends, complete)


def _posts(
    at: Sequence[int], queues: dict[tuple[int, int], list[int]], messages: Sequence[tuple[int, int, int]]
) -> dict[int, tuple[dict[int, tuple[int, ...]], tuple[int, ...]]]:
    """Where a rank gets ready for messages: before the pass that precedes their reader, and in the order in which they are sent;
    see `plan.irecv`. By rank: step -> messages, and those before anything else."""
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
    """From the first pass, or the first backward pass, to the last pass, or the last one that makes gradients of inputs."""
    backward = [p for p, (_, kind, _) in enumerate(row) if kind in (B, BI)]
    found = []
    for first in dict.fromkeys((0, backward[0])):
        for last in dict.fromkeys((len(row) - 1, backward[-1])):
            count: dict[tuple[int, int], int] = {}
            for stage, kind, _ in row[first : last + 1]:
                count[stage, kind] = count.get((stage, kind), 0) + 1
            passes = tuple((stage, kind, n) for (stage, kind), n in sorted(count.items()))
            found.append(Between(row[first][:2], row[last][:2], passes))
    return tuple(found)


def _kept(row: Sequence[_Action], local: Sequence[int]) -> tuple[tuple[int, Kept], ...]:
    """States of what a rank keeps while its passes run, without those that another one exceeds everywhere: so before a forward
    pass there is none, for after it there is more."""
    place = {stage: k for k, stage in enumerate(local)}
    now = [0] * (2 * len(local))
    states: dict[tuple[int, tuple[int, ...]], None] = {}
    for stage, kind, _ in row:
        own = 2 * place[stage]
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
