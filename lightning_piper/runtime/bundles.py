"""Instructions that compute on bundles without a chunk's code: sums, cuts, concatenations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Add, Concat, Cut, Instruction, Pack, Reduce
from lightning_piper.runtime.transport import Bound, Bundle, Slots
from lightning_piper.runtime.wire import restride


def bind_add(instruction: Add, slots: Slots, device: torch.device) -> Bound:
    if instruction.bucket is not None:
        return _bind_add_flat(instruction, instruction.bucket, slots, device)
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


def _bind_add_flat(instruction: Add, bucket: Bucket, slots: Slots, device: torch.device) -> Bound:
    """Terms are bundles, the sum is one flat tensor."""
    reads, into, take = instruction.reads, instruction.into, instruction.take
    alike = all(spec.dtype == bucket.dtype for spec in bucket.tensors)

    def read(k: int) -> list[torch.Tensor]:
        bundle = slots[reads[k].slot]
        if reads[k].last:
            slots[reads[k].slot] = None
        return [bundle[i] for i in take]

    def begin() -> None:
        flat = bucket.empty(device)
        for view, x, y in zip(bucket.views(flat), read(0), read(1), strict=True):
            if alike:
                torch.add(x, y, out=view)
            else:  # in the dtype of the sum, not in that of the terms
                view.copy_(x).add_(y)
        slots[into] = (flat,)

    def add() -> None:
        for view, x in zip(bucket.views(slots[into][0]), read(0), strict=True):
            view.add_(x)

    return add if instruction.in_place else begin


def bind_pack(instruction: Pack, slots: Slots, device: torch.device) -> Bound:
    (source,), into, bucket, take = instruction.reads, instruction.into, instruction.bucket, instruction.take

    def pack() -> None:
        bundle = slots[source.slot]
        if source.last:
            slots[source.slot] = None
        flat = bucket.empty(device)
        for view, i in zip(bucket.views(flat), take, strict=True):
            view.copy_(bundle[i])
        slots[into] = (flat,)

    return pack


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
    if instruction.bucket is not None and len(reads) == 1 and reads[0].last:
        return take(instruction, slots)  # made for this, and read by nobody else

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


def take(instruction: Instruction, slots: Slots) -> Callable[[], Bundle]:
    """A function that gives the only bundle that the instruction reads, and empties its slot if that is its last read."""
    (read,) = instruction.reads
    slot, last = read.slot, read.last

    def taken() -> Bundle:
        bundle: Bundle = slots[slot]
        if last:
            slots[slot] = None
        return bundle

    return taken
