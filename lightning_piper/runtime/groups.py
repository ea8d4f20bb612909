"""Groups of processes that their members alone make.

`torch.distributed.new_group` is called by all processes for every group of any of them, so at n processes that make groups of their
own each would be called n times. Its `use_local_synchronization` does without the others, but names a group by how many groups the
process has (torch 2.13), which members that are in other groups, too, do not agree on: they would wait for each other forever. Here
members name a group by who is in it, what it is for, and how often they have made it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_piper.accelerators._torch_groups import new_group_of_members

# How often each was made, for as long as the default group lives.
_made: tuple[dist.ProcessGroup, Counter[str]] | None = None


def local_group(
    ranks: Iterable[int], purpose: str, backend: str, timeout: timedelta | None = None, options: Any = None
) -> dist.ProcessGroup:
    """A group of these processes. Collective over them: each makes the groups that it has in common with another one in one order.

    Args:
        ranks: of the default group, this process among them.
        purpose: that tells it from other groups of the same processes.
        backend: of `torch.distributed`.
        timeout: of its operations; torch's default if None.
        options: of the backend.
    """
    global _made
    default = dist.group.WORLD
    assert default is not None
    if _made is None or _made[0] is not default:
        _made = (default, Counter())
    members = sorted(ranks)
    name = hashlib.sha1(f"{purpose} {members}".encode(), usedforsecurity=False).hexdigest()
    _made[1][name] += 1
    return new_group_of_members(members, f"{name}-{_made[1][name]}", backend, timeout, options)
