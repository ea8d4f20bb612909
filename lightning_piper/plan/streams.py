"""Events for values that cross logical streams.

Work on one stream runs in the order of issue. A reader on another stream needs an event that is recorded
after the value is made and awaited before it is read. One event serves all values made before it. A paced
instruction (`Instruction.paced`) also waits for the last chunk issued before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_piper.plan.instructions import Instruction, Record, Run, WaitEvent, WaitWork


def add_events(instructions: Sequence[Instruction]) -> tuple[list[Instruction], int]:
    """Insert `Record` and `WaitEvent`. Returns the instructions and the number of events."""
    made: dict[int, int] = {}  # slot -> index of the instruction that wrote it last
    waited: dict[tuple[str, str], int] = {}  # (reading stream, making stream) -> last index it has waited for
    records: dict[int, int] = {}  # index of an instruction -> event to record after it
    # index of an instruction -> (index of the instruction to wait for before it, slots to record)
    waits: dict[int, list[tuple[int, list[int]]]] = {}
    shared: set[tuple[int, str]] = set()  # (slot, stream whose use of the slot's memory is recorded)
    ran: int | None = None  # index of the previous chunk
    for i, instruction in enumerate(instructions):
        crossing: dict[str, list[int]] = {}
        for slot in _touched(instruction):
            source = instructions[made[slot]]
            if source.stream != instruction.stream:
                crossing.setdefault(source.stream, []).append(slot)
        if instruction.paced and ran is not None and instructions[ran].stream != instruction.stream:
            crossing.setdefault(instructions[ran].stream, [])
        for stream, slots in crossing.items():
            behind = (
                [ran] if instruction.paced and ran is not None and instructions[ran].stream == stream else []
            )
            index = max([made[slot] for slot in slots] + behind)
            new = [slot for slot in dict.fromkeys(slots) if (slot, instruction.stream) not in shared]
            shared.update((slot, instruction.stream) for slot in new)
            if waited.get((instruction.stream, stream), -1) < index:
                waited[instruction.stream, stream] = index
                records.setdefault(index, len(records))
            elif new:
                # The stream has waited already. Only its use of the new slots' memory must be recorded.
                index = waited[instruction.stream, stream]
            else:
                continue
            waits.setdefault(i, []).append((index, new))
        for written in instruction.writes:
            if written is not None:
                made[written] = i
        if isinstance(instruction, Run):
            ran = i
    return _insert(instructions, records, waits), len(records)


def _touched(instruction: Instruction) -> list[int]:
    """Return the slots that the instruction reads, adds to in place, or completes."""
    slots = [read.slot for read in instruction.reads]
    if isinstance(instruction, WaitWork) or getattr(instruction, "in_place", False):
        slots += [slot for slot in instruction.writes if slot is not None]
    return slots


def _insert(
    instructions: Sequence[Instruction],
    records: dict[int, int],
    waits: dict[int, list[tuple[int, list[int]]]],
) -> list[Instruction]:
    """Return the instructions with records of events and waits for them. `records` maps an index to its
    event's number, and `waits` maps an index to the recorded indices and shared slots."""
    result: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        for index, slots in waits.get(i, ()):
            result.append(WaitEvent(**_about(instruction), event=records[index], shared=tuple(slots)))
        result.append(instruction)
        if i in records:
            result.append(Record(**_about(instruction), event=records[i]))
    return result


def _about(instruction: Instruction) -> dict[str, Any]:
    return {name: getattr(instruction, name) for name in ("node", "label", "stream", "origin", "placed_by")}
