"""Copies of what is saved, in host memory that the next copies use again: the training goes on while they are written."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch


class HostRoom:
    """Host memory for the copies of one checkpoint at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._taken: list[torch.UntypedStorage] = []

    def begin(self) -> None:
        """The copies so far are of no use any longer: their memory may be taken again, and what was not taken twice is let go."""
        self._free = defaultdict(list)
        for storage in self._taken:
            self._free[storage.nbytes()].append(storage)
        self._taken = []

    def take(self, size: int, pinned: bool) -> torch.UntypedStorage:
        """Memory of `size` bytes; pinned, a device copies into it faster."""
        free = self._free.get(size)
        taken = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        self._taken.append(taken)
        return taken

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor."""
        storage = self.take(tensor.numel() * tensor.itemsize, tensor.is_cuda)
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape).copy_(tensor.detach())  # type: ignore[call-overload, no-any-return]


def snapshot(content: Any, room: HostRoom) -> Any:
    """A copy that nothing changes. Tensors that share memory share it in the copy, as in a file of `torch.save`."""
    room.begin()
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {}
    for tensor in _tensors(content):
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in storages:
            storages[address] = room.take(storage.nbytes(), tensor.is_cuda)
            storages[address].copy_(storage)
        like = torch.empty(0, dtype=tensor.dtype)
        memo[id(tensor)] = like.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.deepcopy(content, memo)


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """Of dicts, lists and tuples: those that are nothing but memory, sizes and strides. Others are copied in their own way."""
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
