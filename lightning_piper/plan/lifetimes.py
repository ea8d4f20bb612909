"""The last read of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_piper.errors import VerificationError
from lightning_piper.plan.instructions import Instruction, Read


def mark_last_reads(device: int, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Mark the last read of each slot, which empties the slot.

    Raises:
        VerificationError: An instruction writes a slot that no later instruction reads.
    """
    read: set[int] = set()
    result: list[Instruction] = []
    for instruction in reversed(instructions):
        for slot in instruction.writes:
            if slot is not None and slot not in read:
                raise VerificationError(
                    f"device {device}: no instruction reads the result of {instruction.where}. If you added "
                    "an operation, check its lowering. Otherwise, report this [PIPER-V003]"
                )
        reads: list[Read] = []
        for source in reversed(instruction.reads):
            reads.append(Read(source.slot, source.slot not in read))
            read.add(source.slot)
        result.append(replace(instruction, reads=tuple(reversed(reads))) if reads else instruction)
    result.reverse()
    return result
