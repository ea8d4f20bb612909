"""Copies of tensors in reused host memory, which a thread may make while the training continues.

Only an update, and users' code, changes the parameters and the states of the optimizer. So the thread has time until
the next update, which waits for the copies.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_piper.accelerators._torch_dispatch import (
    OperationWatch,
    aliased_arguments,
    is_innermost,
    modes_are_active,
)
from lightning_piper.capture.torch_private._torch import tree_leaves
from lightning_piper.runtime.same_machine.forks import in_forks

SMALL = 64  # bytes, of which a copy takes less time than the preparation of a later copy


class HostRoom:
    """A pool of host memory for the copies of one checkpoint at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._taken: list[torch.UntypedStorage] = []

    def begin(self) -> None:
        """Make the memory of the previous copies available again, and free memory that the previous copies
        did not use."""
        self._free = defaultdict(list)
        for storage in self._taken:
            self._free[storage.nbytes()].append(storage)
        self._taken = []

    def take(self, size: int, pinned: bool) -> torch.UntypedStorage:
        """Return memory of `size` bytes, which no other copy uses until the next `begin`. With `pinned`, new
        memory is pinned, because a device copies faster into it. Reused memory is as it was allocated."""
        free = self._free.get(size)
        taken = (
            free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        )
        self._taken.append(taken)
        return taken


def memory_of(values: Iterable[Any]) -> set[int]:
    """Return the addresses of the memory of all plain tensors in host memory among `values`."""
    return {
        x.untyped_storage().data_ptr()
        for x in values
        if (type(x) is torch.Tensor or isinstance(x, nn.Parameter))
        and x.device.type == "cpu"
        and x.layout == torch.strided
    } - {0}


class LateCopies:
    """The copies of the tensors of one checkpoint.

    Between `watch` and `unwatch`, an operation of the calling thread that changes memory waits until this memory is
    copied. So does an operation that makes an alias of it, such as `detach`, because numpy could change the alias. So
    users' hooks may change every tensor.

    Args:
        memory: The memory of the copies. The copies of the previous checkpoint end.
        steady: Addresses of memory that changes only while it is watched, or after `settle`. `make` copies tensors in
            this memory. All other tensors are copied immediately.
    """

    def __init__(self, memory: HostRoom, steady: Collection[int] = ()) -> None:
        memory.begin()
        self._room = memory
        # Another mode might end before the watch, but only the innermost mode can end.
        self._steady = frozenset[int]() if modes_are_active() else frozenset(steady)
        self._works: list[Callable[[], object]] = []  # `make` calls these functions
        self._memory: set[int] = set()  # addresses of the memory that `make` copies
        self._made = threading.Event()
        self._mode: _WriteWatch | None = None

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor, made now."""
        return self._memory_for(tensor).copy_(tensor.detach())

    def later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor. `make` makes it, if the memory of the tensor is steady."""
        copy = self._memory_for(tensor)
        self.do([tensor], lambda: copy.copy_(tensor.detach()))
        return copy

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._room.take(tensor.numel() * tensor.itemsize, tensor.device.type != "cpu")
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload, no-any-return]

    def copied_memory(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of the memory of a tensor. `make` fills it, if the memory is steady and not small."""
        copy = self._room.take(storage.nbytes(), storage.device.type != "cpu")
        if storage.nbytes() <= SMALL:
            return copy.copy_(storage)
        source, target = _bytes(storage), _bytes(copy)
        self.do([source], lambda: target.copy_(source))
        return copy

    def do(self, sources: Sequence[torch.Tensor], work: Callable[[], object]) -> None:
        """Call a function that copies these tensors: in `make` if all of them are in steady memory, otherwise now."""
        addresses = {x.untyped_storage().data_ptr() for x in sources if x.device.type == "cpu"}
        if addresses and addresses <= self._steady:
            self._works.append(work)
            self._memory |= addresses
        else:
            work()

    def make(self) -> None:
        """Make the copies that are left. A thread calls this method, once."""
        try:
            for work in self._works:
                work()
        finally:
            self._works.clear()
            self._made.set()

    def wait_for(self, values: Iterable[Any]) -> None:
        """Wait until the copies are made, if any of these values is a tensor in memory that is still to be copied."""
        if not self._made.is_set() and not self._memory.isdisjoint(memory_of(values)):
            self._made.wait()

    def settle(self) -> None:
        """Wait until the copies are made, and end the watch."""
        if self._memory:
            self._made.wait()
        self.unwatch()

    def watch(self) -> None:
        if self._mode is None and self._memory and not self._made.is_set():
            self._mode = _WriteWatch(self)
            self._mode.begin()
            in_forks(self, LateCopies._forked)

    def unwatch(self) -> None:
        # If the user's code has entered another mode since, the watch stays. It costs time only.
        if self._mode is not None and is_innermost(self._mode):
            self._mode.end()
            self._mode = None

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Do not watch inside of this context, because its code does not change steady memory."""
        self.unwatch()
        try:
            yield
        finally:
            self.watch()

    def _forked(self) -> None:
        """End the watch in a forked process, which does not have the thread that makes the copies."""
        self._made = threading.Event()  # the thread may have held the lock of the old one
        self._made.set()
        self.unwatch()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _WriteWatch(OperationWatch):
    """The mode in which operations wait before they change memory that is still to be copied, or make an alias of it."""

    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self._copies = copies

    def before(self, operation: Any, args: Any, kwargs: Any) -> None:
        if aliased := aliased_arguments(operation, args, kwargs):
            self._copies.wait_for(tree_leaves(aliased))
