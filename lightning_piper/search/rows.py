"""Schedules by name, as what a search asks of them: who runs what after what, what is kept meanwhile, and who sends to whom.

All of it follows from the order of the passes alone, not from how long they take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_piper import schedules
from lightning_piper.directives import Order
from lightning_piper.errors import DirectiveError
from lightning_piper.limits import PASSES

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


@dataclass(frozen=True)
class Rows:
    """A schedule of `stages` stages on `ranks` ranks.

    Attributes:
        rank: of each stage.
        local: stages of each rank.
        steps: of each rank, one after the other.
        at_once: of each rank, the messages for which it is ready before its first pass.
        messages: of each message: channel (an index), border (of stages b and b + 1), receiver, and its step there.
        channels: how many there are.
        between: of each rank; see `Between`.
        kept: of each rank, the largest states of what is kept: (stage whose backward pass runs, or -1; what is kept).
    """

    ranks: int
    stages: int
    rank: tuple[int, ...]
    local: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]
    at_once: tuple[tuple[int, ...], ...]
    messages: tuple[tuple[int, int, int, int], ...]
    channels: int
    between: tuple[tuple[Between, ...], ...]
    kept: tuple[tuple[tuple[int, Kept], ...], ...]


@functools.lru_cache(maxsize=128)
def rows_of(name: str, per_rank: int, ranks: int, microbatches: int) -> Rows:
    """The rows of a schedule. Linear in its passes.

    Raises:
        DirectiveError: the schedule does not exist for these numbers; see its builder.
    """
    if name not in SHAPES:
        raise DirectiveError(f"schedule {name!r} is not known; give one of {', '.join(SHAPES)}")
    more = {"stages_per_device": per_rank} if name == "interleaved_one_f_one_b" else {}
    program = getattr(schedules, name)(ranks * per_rank, microbatches, **more)
    orders = [directive for directive in program if isinstance(directive, Order)]
    return _rows([_actions(order) for order in orders], ranks * per_rank)


def _actions(order: Order) -> list[tuple[int, int, int]]:
    """Stage, kind and microbatch of each pass. Passes that may overlap stand one after the other."""
    flat: list[Any] = []
    for item in order.filters:
        flat += item if isinstance(item, list | tuple) else [item]
    return [(item["PP"], KINDS.index(item["PASS"]), item["MB"]) for item in flat]


def _rows(actions: Sequence[Sequence[tuple[int, int, int]]], stages: int) -> Rows:
    rank = {stage: r for r, row in enumerate(actions) for stage, _, _ in row}
    local = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in actions)
    made: dict[tuple[int, int, int], tuple[int, int]] = {}  # forward (0) or not (1), stage, microbatch -> message, border
    queues: dict[tuple[int, int], list[int]] = {}  # channel -> its messages, as they are sent
    messages: list[tuple[int, int, int]] = []  # channel, border, receiver
    for r, row in enumerate(actions):
        for stage, kind, mb in row:
            to = stage + 1 if kind == F else stage - 1
            if kind != BW and 0 <= to < stages and rank[to] != r:
                number = made[int(kind != F), to, mb] = (len(messages), min(stage, to))
                channel = queues.setdefault((r, rank[to]), [])
                messages.append(
                    (list(queues).index((r, rank[to])) if not channel else messages[channel[0]][0], number[1], rank[to])
                )
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
    return Rows(
        len(actions), stages, tuple(rank[s] for s in range(stages)), local, tuple(steps), tuple(at_once), full, len(queues),
        tuple(map(_between, actions)), tuple(_kept(row, own) for row, own in zip(actions, local, strict=True)),
    )  # fmt: skip


def _step(
    row: Sequence[tuple[int, int, int]], p: int, stages: int, made: dict[tuple[int, int, int], tuple[int, int]],
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


def _between(row: Sequence[tuple[int, int, int]]) -> tuple[Between, ...]:
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


def _kept(row: Sequence[tuple[int, int, int]], local: Sequence[int]) -> tuple[tuple[int, Kept], ...]:
    """States of what a rank keeps while its passes run, without those that another one exceeds everywhere."""
    place = {stage: k for k, stage in enumerate(local)}
    now = [[0, 0] for _ in local]
    states: dict[tuple[int, Kept], None] = {}
    for stage, kind, _ in row:
        own = now[place[stage]]
        own[0] += kind == F
        states[-1 if kind in (F, BW) else stage, tuple((a, w) for a, w in now)] = None
        if kind in (B, BI):
            own[0] -= 1
            own[1] += kind == BI
        own[1] -= kind == BW
    largest: list[tuple[int, Kept]] = []
    for runs, state in sorted(states, key=lambda s: -sum(map(sum, s[1]))):
        if not any(runs in (-1, other) and _covers(more, state) for other, more in largest):
            largest.append((runs, state))
    return tuple(largest)


def _covers(more: Kept, state: Kept) -> bool:
    return all(a >= x and b >= y for (a, b), (x, y) in zip(more, state, strict=True))
