"""Instructions that compute on bundles without a chunk's code: sums, cuts, concatenations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_piper.ir.values import TensorSpec
from lightning_piper.plan.instructions import Add, Concat, Cut, Reduce
from lightning_piper.runtime.transport import Bound, Bundle, Slots
from lightning_piper.runtime.wire import restride


def bind_add(instruction: Add, slots: Slots) -> Bound:
    if instruction.in_place:
        return _bind_add_in_place(instruction, slots)
    (left, right), into = instruction.reads, instruction.into

    def add() -> None:
        a, b = list(slots[left.slot]), list(slots[right.slot])
        if left.last:
            slots[left.slot] = None
        if right.last:
            slots[right.slot] = None
        a.reverse()
        b.reverse()
        total = []
        while a:  # each pair of terms is freed before the next sum is made
            total.append(torch.add(a.pop(), b.pop()))
        slots[into] = tuple(total)

    return add


def _bind_add_in_place(instruction: Add, slots: Slots) -> Bound:
    (term,), into = instruction.reads, instruction.into
    source, last = term.slot, term.last

    def add() -> None:
        for x, y in zip(slots[into], slots[source], strict=True):
            x.add_(y)
        if last:
            slots[source] = None

    return add


def bind_cut(instruction: Cut, slots: Slots) -> Bound:
    (source,), into, specs = instruction.reads, instruction.into, instruction.tensors
    dim, start, length = instruction.dim, instruction.start, instruction.stop - instruction.start

    def cut() -> None:
        bundle = slots[source.slot]
        if source.last:
            slots[source.slot] = None
        slots[into] = tuple(restride(x.narrow(dim, start, length), s) for x, s in zip(bundle, specs, strict=True))

    return cut


def bind_concat(instruction: Concat, slots: Slots) -> Bound:
    reads, into, specs, dim = instruction.reads, instruction.into, instruction.tensors, instruction.dim

    def concat() -> None:
        bundles = [slots[read.slot] for read in reads]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        joined = (torch.cat(parts, dim) for parts in zip(*bundles, strict=True))
        slots[into] = tuple(restride(x, s) for x, s in zip(joined, specs, strict=True))

    return concat


def read_sum(instruction: Reduce, slots: Slots, device: torch.device) -> Callable[[], Bundle]:
    """A function that gives this device's part of a reduction, in tensors of its own."""
    reads, specs = instruction.reads, instruction.tensors

    def total() -> Bundle:
        if not reads:
            return tuple(torch.zeros(s.shape, dtype=s.dtype, device=device) for s in specs)
        result = tuple(x.clone() for x in slots[reads[0].slot])
        for read in reads[1:]:
            for x, y in zip(result, slots[read.slot], strict=True):
                x.add_(y)
        for read in reads:
            if read.last:
                slots[read.slot] = None
        return result

    return total


def buckets_of(tensors: Sequence[TensorSpec], size: int) -> list[list[int]]:
    """Indices of tensors that travel together: of one dtype, in order, until a bucket has `size` bytes."""
    buckets: list[list[int]] = []
    open_: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, spec in enumerate(tensors):
        bucket, filled = open_.get(spec.dtype, ([], size))
        if filled >= size:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_[spec.dtype] = (bucket, filled + spec.nbytes)
    return buckets
