"""Placement of irecvs: early enough to overlap with compute, in the order of the sends."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_piper.plan.instructions import Channel, Instruction, Irecv, Run, WaitWork


def place_irecvs(
    instructions: list[Instruction], irecvs: Mapping[int, Irecv], rank: Mapping[int, int]
) -> list[Instruction]:
    """Insert the `Irecv`s into the instructions.

    An irecv is placed before the chunk that precedes its wait. The transfer can take as long as this chunk,
    and its buffer is not held for longer. The irecvs of a channel must be in the order of its messages, because
    NCCL matches messages by order. An irecv therefore moves up if the plan waits for a later message of its
    channel earlier.

    Args:
        instructions: The instructions of one device.
        irecvs: Id of the receiving node -> its irecv.
        rank: Id of a node -> its position in the global order.
    """
    at: dict[int, int] = {}  # node -> index of the instruction before which its irecv stands
    last_run = 0
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, WaitWork) and instruction.node in irecvs:
            at[instruction.node] = last_run
        elif isinstance(instruction, Run):
            last_run = i
    channels: dict[Channel, list[Irecv]] = {}
    for irecv in sorted(irecvs.values(), key=lambda p: rank[p.message]):
        channels.setdefault(irecv.channel, []).append(irecv)
    before: dict[int, list[Irecv]] = {}
    for queue in channels.values():
        limit = len(instructions)
        for irecv in reversed(queue):
            limit = min(limit, at[irecv.node])
            before.setdefault(limit, []).append(irecv)
    result: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        result.extend(sorted(before.get(i, ()), key=lambda p: rank[p.message]))
        result.append(instruction)
    return result
