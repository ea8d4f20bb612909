"""torch's names for communication between processes. Tested with torch 2.13.

Each entry states the behavior that the package relies on.

- Methods of `torch.distributed.ProcessGroup`: every function of `torch.distributed` and
  `torch.distributed.nn` ends in one of them, under whatever name a module has imported the function.
- `_functional_collectives._resolve_group`: the functional collectives look up their group with it.
- `torch.distributed.nn.functional._not_supported_under_compile`: raises an error in all of that module's
  functions during a trace.
- `distributed_c10d._get_group_size`: `torch.distributed.get_world_size` reads the number with it.
- `distributed_c10d._new_group_with_tag`: creates every group, and waits for the group's processes.
- `distributed_c10d._object_to_tensor`: converts a Python object to a tensor before sending it. This fails on
  tensors without data.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_METHODS = (
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base",
    "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
    "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "scatter", "send",
)  # fmt: skip
_FUNCTIONS = (
    ("torch.distributed._functional_collectives", "_resolve_group"),
    ("torch.distributed.nn.functional", "_not_supported_under_compile"),
    ("torch.distributed.distributed_c10d", "_new_group_with_tag"),
    ("torch.distributed.distributed_c10d", "_object_to_tensor"),
)


@contextlib.contextmanager
def without_communication(refuse: Callable[[], Exception], sized: Callable[[], None]) -> Iterator[None]:
    """Within this context, raise the error that `refuse` returns if this thread communicates. Call `sized` if
    this thread reads the number of processes. Other threads are not affected."""
    if not dist.is_available():
        yield
        return
    thread = threading.get_ident()

    def guarded(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise refuse()
            return original(*args, **kwargs)

        return call

    def noted(original: Any) -> Callable[..., Any]:
        """Return `original` with a call of `sized` before it, unless `sized` itself calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not asking:
                asking.append(True)  # `sized` may also read the number
                try:
                    sized()
                finally:
                    asking.clear()
            return original(*args, **kwargs)

        return call

    asking: list[bool] = []
    places: list[tuple[Any, str]] = [(dist.ProcessGroup, name) for name in _METHODS]
    places += [(sys.modules[module], name) for module, name in _FUNCTIONS if module in sys.modules]
    size = sys.modules["torch.distributed.distributed_c10d"], "_get_group_size"
    found = [
        (owner, name, vars(owner)[name], getattr(owner, name))
        for owner, name in [*places, size]
        if name in vars(owner)
    ]
    try:
        for owner, name, _, called in found:
            setattr(owner, name, noted(called) if name == size[1] else guarded(called))
        yield
    finally:
        # `stored` comes from `vars`, because `getattr` of a class may return a bound method.
        for owner, name, stored, _ in found:
            setattr(owner, name, stored)
