"""What `capture._torch` is for the rest of torch, for groups of processes. Tried on torch 2.13; relied on is:

- `_new_process_group_helper`: what `new_group` does for the members of a group, under a name that is given to it.
- `_world.pg_map` and `_world.pg_group_ranks`: all groups, with the store of the default group, and the ranks of members.
- `_get_default_timeout`: of a backend.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def new_group_of_members(ranks: list[int], name: str, backend: str, timeout: timedelta | None, options: Any) -> dist.ProcessGroup:
    """What `dist.new_group` makes. Only the members call it, and give it the same name.

    Args:
        ranks: of the default group, sorted.
    """
    default = dist.group.WORLD
    assert default is not None
    _, store = c10d._world.pg_map[default]
    kind, rank = c10d.Backend(backend), ranks.index(dist.get_rank())
    about: dict[str, Any] = {
        "store": store,
        "group_name": name,
        "backend_options": options,
        "timeout": timeout or c10d._get_default_timeout(kind),
    }
    # Bound to a device, NCCL would split the default communicator, in which all processes have to take part.
    bound, default.bound_device_id = default.bound_device_id, None
    group: dist.ProcessGroup
    try:
        group, _ = c10d._new_process_group_helper(len(ranks), rank, ranks, kind, **about)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


def keep_all_groups() -> None:
    """Let every group of this process outlive the interpreter. Gloo's destructor waits for messages, and a process that has failed
    while others live on would not end before the timeout."""
    for group in c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
