"""Where receives are started: early enough to overlap with compute, in the order in which the sender sends."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_piper.plan.instructions import Channel, Instruction, Post, Run, Wait


def place_posts(instructions: list[Instruction], posts: Mapping[int, Post], rank: Mapping[int, int]) -> list[Instruction]:
    """The instructions with the posts among them.

    A post stands before the chunk that precedes the wait: the transfer has that chunk's time, and its buffer is held no
    longer. Messages of a channel meet in order (NCCL knows no other way), so a post moves up where a later message of its
    channel is posted before it.

    Args:
        instructions: of one device.
        posts: by id of the receiving node.
        rank: message -> when it is sent, relative to others on its channel.
    """
    at: dict[int, int] = {}  # node -> index of the instruction before which its post stands
    last_run = 0
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Wait) and instruction.node in posts:
            at[instruction.node] = last_run
        elif isinstance(instruction, Run):
            last_run = i
    channels: dict[Channel, list[Post]] = {}
    for post in sorted(posts.values(), key=lambda p: rank[p.message]):
        channels.setdefault(post.channel, []).append(post)
    before: dict[int, list[Post]] = {}
    for queue in channels.values():
        limit = len(instructions)
        for post in reversed(queue):
            limit = min(limit, at[post.node])
            before.setdefault(limit, []).append(post)
    result: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        result.extend(sorted(before.get(i, ()), key=lambda p: rank[p.message]))
        result.append(instruction)
    return result
