"""Process groups that only their members create.

All processes must call `torch.distributed.new_group` for every group, even for groups without this process.
If n processes each make groups of their own, each process makes n calls. With `use_local_synchronization`
only members call it. But torch then names the group by the number of groups that the process has (torch
2.13). Members that are in different numbers of other groups disagree on the name, and wait for each other
forever.

In this module, members name a group by its ranks, its purpose and how often the members have made it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_piper.accelerators._torch_groups import new_group_of_members
from lightning_piper.runtime.connections import noted_connections

# The default group, and name of a group -> how often the group was made under this default group.
_made: tuple[dist.ProcessGroup, Counter[str]] | None = None


def local_group(
    ranks: Iterable[int], purpose: str, backend: str, timeout: timedelta | None = None, options: Any = None
) -> dist.ProcessGroup:
    """Create a group of these processes. Collective over these processes. Any two processes must create their
    common groups in the same order.

    Args:
        ranks: Ranks in the default group, including this process.
        purpose: A text that distinguishes groups of the same processes.
        backend: A backend of `torch.distributed`.
        timeout: The timeout of the group's operations (default: torch's).
        options: Options of the backend.
    """
    global _made
    default = dist.group.WORLD
    assert default is not None
    if _made is None or _made[0] is not default:
        _made = (default, Counter())
    members = sorted(ranks)
    name = hashlib.sha1(f"{purpose} {members}".encode(), usedforsecurity=False).hexdigest()
    _made[1][name] += 1
    with noted_connections():
        return new_group_of_members(members, f"{name}-{_made[1][name]}", backend, timeout, options)
