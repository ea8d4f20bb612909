"""The order in which the directives of a program are applied."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from lightning_piper.directives.base import Directive

PLACES = ("place", "place of microbatches")
OF_TENSORS = ("shard_weights", "shard_sequences")  # the ops of the directives that shard tensors
# Kind of a directive (`Directive.kind_in`) -> the kinds that are applied before it.
FOLLOWS: Mapping[str, frozenset[str]] = {
    kind: frozenset(earlier)
    for kind, earlier in {
        "chunk_loss": (),
        "place": (),
        "split": (),
        "place of microbatches": ("split",),
        "shard_weights": (*PLACES, "split"),
        "shard_sequences": (*PLACES, "split"),
        "shard_experts": (*PLACES, "split", *OF_TENSORS),
        "replicate": (*PLACES, *OF_TENSORS),
        "recompute": (*PLACES, "split", "shard_experts"),
        "offload": (*PLACES, "split", *OF_TENSORS, "shard_experts", "recompute"),
        "order": (*PLACES, "split"),
        "order of R": (*PLACES, "split", "recompute"),
        "order of copies": (*PLACES, "split", "recompute", "offload"),
    }.items()
}


def applied_order(program: Sequence[Directive]) -> list[int]:
    """Return the indices of a program's directives in the order in which they are applied.

    A directive comes after all directives of the kinds that `FOLLOWS` lists for it. Otherwise the order of
    the program stays. A directive whose kind is not in `FOLLOWS` keeps its index, and no other directive
    moves from before this index to after it, or the other way.
    """
    kinds, found = [directive.kind_in(program) for directive in program], list[int]()
    for known, run in itertools.groupby(range(len(program)), lambda i: kinds[i] in FOLLOWS):
        indices = list(run)
        found += _sorted(kinds, indices) if known else indices
    return found


def _sorted(kinds: Sequence[str], indices: list[int]) -> list[int]:
    """Return `indices` in the order in which their directives are applied. All their kinds are in
    `FOLLOWS`."""
    waiting: dict[str, deque[int]] = {}
    for i in indices:
        waiting.setdefault(kinds[i], deque()).append(i)
    found: list[int] = []
    while waiting:
        ready = (kind for kind in waiting if FOLLOWS[kind].isdisjoint(waiting))
        kind = min(ready, key=lambda kind: waiting[kind][0])
        found.append(waiting[kind].popleft())
        if not waiting[kind]:
            del waiting[kind]
    return found
