"""Gradients that are kept from batch to batch while they are accumulated, and summed over the replicas with the last one."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Collective, Instruction, Record, WaitEvent
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.transport import Bound, Slots

# Bucket, members of the group that sums it, and which of several such sums of a step it is: the same for every size of a batch.
BufferKey = tuple[Bucket, tuple[int, ...], int]
GradientBuffer = MutableMapping[BufferKey, torch.Tensor]


def keys_of(plan: Plan) -> dict[int, BufferKey]:
    """Node of each sum over replicas that waits for the last batch -> where its terms are kept until then. Of sums of sums, such as
    first within machines and then between them, the first keeps its terms; the next has none until the last batch."""
    found: dict[int, BufferKey] = {}
    late = slots_made_by_sync(plan)
    counts: dict[tuple[Bucket, tuple[int, ...]], int] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, Collective) and instruction.sums and instruction.node in plan.sync_only:
            if instruction.reads[0].slot in late:
                continue
            assert instruction.bucket is not None
            place = (instruction.bucket, instruction.members)
            number = counts[place] = counts.get(place, -1) + 1
            found[instruction.node] = (*place, number)
    return found


def bind_accumulate(instruction: Collective, key: BufferKey, slots: Slots, buffer: GradientBuffer) -> Bound:
    """Instead of the sum over replicas: keep this device's term, added to what is kept already."""
    slot = instruction.reads[0].slot

    def keep() -> None:
        (flat,) = slots[slot]
        slots[slot] = None
        if key in buffer:
            buffer[key].add_(flat)
        else:
            buffer[key] = flat

    return keep


def bind_add_accumulated(instruction: Collective, key: BufferKey, slots: Slots, buffer: GradientBuffer) -> Bound:
    """Before the sum over replicas: add what was kept to this device's term."""
    slot = instruction.reads[0].slot

    def merge() -> None:
        kept = buffer.pop(key, None)
        if kept is not None:
            slots[slot][0].add_(kept)

    return merge


def slots_made_by_sync(plan: Plan) -> set[int]:
    """Slots that are written in the last batch alone."""
    found = [instruction for instruction in plan.instructions if is_sync_only(plan, instruction)]
    return {slot for instruction in found for slot in instruction.writes if slot is not None}


def is_sync_only(plan: Plan, instruction: Instruction) -> bool:
    """Does the instruction run in the last batch alone? Events stay: they order what runs in every batch, too."""
    return instruction.node in plan.sync_only and not isinstance(instruction, Record | WaitEvent)
