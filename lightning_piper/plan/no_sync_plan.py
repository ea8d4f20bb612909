"""The part of a plan that runs with a batch before the last one of a gradient accumulation.

Sums over replicas wait for the last batch. Until then, the device keeps the terms of these sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import Collective, Instruction, Keep, Record, WaitEvent
from lightning_piper.plan.plan import Plan

# (bucket, members of the group that sums it, index among the step's sums of this bucket over these members).
# The key is the same for every batch size.
BufferKey = tuple[Bucket, tuple[int, ...], int]


def keys_of(plan: Plan) -> dict[int, BufferKey]:
    """Return node of a sum over replicas that waits for the last batch -> key of the buffer that keeps the
    sum's terms.

    If one sum reads another, such as a sum between machines after a sum within machines, only the first sum
    keeps its terms. The second sum does not have terms before the last batch.
    """
    found: dict[int, BufferKey] = {}
    late = _made_by_last(plan)
    counts: dict[tuple[Bucket, tuple[int, ...]], int] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, Collective) and instruction.sums and instruction.node in plan.sync_only:
            if instruction.reads[0].slot in late:
                continue
            assert instruction.bucket is not None
            key = (instruction.bucket, instruction.members)
            number = counts[key] = counts.get(key, -1) + 1
            found[instruction.node] = (*key, number)
    return found


def no_sync_instructions(plan: Plan) -> Iterator[tuple[int, Instruction]]:
    """Yield the instructions of a batch before the last one, each with its index in the plan.

    A sum over replicas becomes a `Keep`. Events stay, because they also order work that runs in every batch.
    """
    keys, late = keys_of(plan), _made_by_last(plan)
    for i, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Collective) and instruction.node in keys:
            about = {
                name: getattr(instruction, name)
                for name in ("node", "label", "stream", "origin", "placed_by", "reads")
            }
            yield i, Keep(**about)
        elif isinstance(instruction, WaitEvent):
            yield (
                i,
                dataclasses.replace(
                    instruction, shared=tuple(slot for slot in instruction.shared if slot not in late)
                ),
            )
        elif not _last_only(plan, instruction):
            yield i, instruction


def _made_by_last(plan: Plan) -> set[int]:
    """Return the slots that only the last batch writes."""
    found = [instruction for instruction in plan.instructions if _last_only(plan, instruction)]
    return {slot for instruction in found for slot in instruction.writes if slot is not None}


def _last_only(plan: Plan, instruction: Instruction) -> bool:
    return instruction.node in plan.sync_only and not isinstance(instruction, Record | WaitEvent)
