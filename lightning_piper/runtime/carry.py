"""Gradients that are kept from batch to batch while they are accumulated, and summed over the replicas with the last one."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Await, Collective, Instruction, Record
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.transport import Bound, Slots

# Bucket, members of the group that sums it, and which of several such sums of a step it is: the same for every size of a batch.
CarryKey = tuple[Bucket, tuple[int, ...], int]
Carry = MutableMapping[CarryKey, torch.Tensor]


def keys_of(plan: Plan) -> dict[int, CarryKey]:
    """Node of each sum over replicas that waits for the last batch -> where its terms are kept until then. Of sums of sums, such as
    first within machines and then between them, the first keeps its terms; the next has none until the last batch."""
    found: dict[int, CarryKey] = {}
    late = slots_made_late(plan)
    counts: dict[tuple[Bucket, tuple[int, ...]], int] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, Collective) and instruction.sums and instruction.node in plan.deferred:
            if instruction.reads[0].slot in late:
                continue
            assert instruction.bucket is not None
            place = (instruction.bucket, instruction.members)
            number = counts[place] = counts.get(place, -1) + 1
            found[instruction.node] = (*place, number)
    return found


def bind_keep(instruction: Collective, key: CarryKey, slots: Slots, carry: Carry) -> Bound:
    """Instead of the sum over replicas: keep this device's term, added to what is kept already."""
    slot = instruction.reads[0].slot

    def keep() -> None:
        (flat,) = slots[slot]
        slots[slot] = None
        if key in carry:
            carry[key].add_(flat)
        else:
            carry[key] = flat

    return keep


def bind_merge_kept(instruction: Collective, key: CarryKey, slots: Slots, carry: Carry) -> Bound:
    """Before the sum over replicas: add what was kept to this device's term."""
    slot = instruction.reads[0].slot

    def merge() -> None:
        kept = carry.pop(key, None)
        if kept is not None:
            slots[slot][0].add_(kept)

    return merge


def slots_made_late(plan: Plan) -> set[int]:
    """Slots that are written in the last batch alone."""
    return {
        slot for instruction in plan.instructions if is_late(plan, instruction) for slot in instruction.writes if slot is not None
    }


def is_late(plan: Plan, instruction: Instruction) -> bool:
    """Does the instruction run in the last batch alone? Events stay: they order what runs in every batch, too."""
    return instruction.node in plan.deferred and not isinstance(instruction, Record | Await)
