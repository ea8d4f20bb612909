"""Copies of the content of a checkpoint, in reused host memory. Training continues while a thread writes the
copies."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch


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

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor, in memory of this pool."""
        storage = self.take(tensor.numel() * tensor.itemsize, tensor.device.type != "cpu")
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape).copy_(tensor.detach())  # type: ignore[call-overload, no-any-return]


def snapshot(content: Any, room: HostRoom) -> Any:
    """Return a copy of `content` in host memory that later changes do not reach. Tensors that share memory
    also share memory in the copy, as with `torch.save`. The memory of the previous copy in the same `room` is
    used again, so do not use that copy any more."""
    room.begin()
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {}
    for tensor in _tensors(content):
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in storages:
            storages[address] = room.take(storage.nbytes(), tensor.device.type != "cpu")
            storages[address].copy_(storage)
        like = torch.empty(0, dtype=tensor.dtype)
        memo[id(tensor)] = like.set_(
            storages[address], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return copy.deepcopy(content, memo)


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in dicts, lists and tuples.

    A plain tensor has elements, and memory, sizes and strides describe it fully. A parameter or a sparse tensor
    is not plain. `deepcopy` copies all tensors that are not plain.
    """
    if type(content) is torch.Tensor:
        if (
            content.layout == torch.strided
            and content.numel()
            and not (content.is_quantized or content.is_conj() or content.is_neg())
        ):
            yield content
    elif isinstance(content, dict | list | tuple):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _tensors(part)
