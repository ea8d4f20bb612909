"""Private names of torch for process groups (torch 2.13). `capture.torch_private` has the names for tracing.

This file relies on:

- `_new_process_group_helper`: does the work of `new_group` for the members of a group, under a given name.
- `_world.pg_map`: each group -> its backend and its store.
- `_world.pg_group_ranks`: each group -> the ranks of its members.
- `_get_default_timeout`: the default timeout of a backend.
- `_world.group_count`: the number of groups so far, by which the members find each other. `destroy_process_group` sets it to
  0, but only if the default group exists.
- `old_hook` in `_distributed_excepthook`: the `sys.excepthook` from before the creation of the default group.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def new_group_of_members(
    ranks: list[int], name: str, backend: str, timeout: timedelta | None, options: Any
) -> dist.ProcessGroup:
    """Create a process group like `dist.new_group`, but only its members call this function. All members pass
    the same name.

    Args:
        ranks: The members' ranks in the default group, sorted.
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
    # If the default group is bound to a device, NCCL splits its communicator, and all processes must take
    # part in the split.
    bound, default.bound_device_id = default.bound_device_id, None
    group: dist.ProcessGroup
    try:
        group, _ = c10d._new_process_group_helper(len(ranks), rank, ranks, kind, **about)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


def destroy_all_groups() -> None:
    """Destroy all groups of this process, so that it can create a default group with processes that have not had one. The
    creation of the default group may have failed."""
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.group_count = 0


def keep_all_groups() -> None:
    """Make every group of this process outlive the interpreter.

    The destructor of a gloo group waits for messages. A process that has failed would wait there until the
    timeout, because other processes are still running.
    """
    for group in c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_default_excepthook(hook: Callable[..., Any]) -> bool:
    """Return whether a `sys.excepthook` is Python's own, or torch's around Python's own.

    torch installs a hook whenever it creates a default group. That hook writes the rank before each line that
    the hook before it prints.
    """
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        hook = inspect.getclosurevars(hook).nonlocals["old_hook"]
    return hook is sys.__excepthook__
