"""Copies of the content of a checkpoint, which later changes do not reach."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_piper.checkpoint.late_copies import LateCopies


def snapshot(content: Any, copies: LateCopies) -> Callable[[], Any]:
    """Return a function that returns a copy of `content` in host memory. Later changes of `content` do not reach the
    copy. Tensors that share memory also share memory in the copy, as with `torch.save`.

    A pickle in memory holds everything except the tensors, because it takes less time than `copy.deepcopy`.

    Args:
        copies: Makes the copies of the tensors. Call the function after `copies.make`.

    Raises:
        Exception: The content has an object that cannot be pickled.
    """
    data, tensors = pickled(content, copies)
    return lambda: unpickled(data, tensors)


def pickled(content: Any, copies: LateCopies) -> tuple[bytes, list[torch.Tensor]]:
    """Return a pickle of `content` without its plain tensors, and the copies of these tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file, copies)
    pickler.dump(content)
    return file.getvalue(), pickler.tensors


def unpickled(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the content of a pickle of `pickled`, with these tensors."""
    return _TensorUnpickler(io.BytesIO(data), tensors).load()


class _Pickler(pickle.Pickler):
    """A pickler that leaves out the plain tensors. `tensors` has their copies.

    A plain tensor has elements, and memory, sizes and strides describe it fully. A parameter or a sparse tensor is
    not plain.
    """

    def __init__(self, file: io.BytesIO, copies: LateCopies) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._copies = copies
        self._storages: dict[int, torch.UntypedStorage] = {}  # address of memory -> its copy

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is not torch.Tensor
            or obj.layout != torch.strided
            or not obj.numel()
            or obj.is_meta
            or obj.is_quantized
            or obj.is_conj()
            or obj.is_neg()
            or vars(obj)
        ):
            return NotImplemented
        storage = obj.untyped_storage()
        if (address := storage.data_ptr()) not in self._storages:
            self._storages[address] = self._copies.copied_memory(storage)
        like = torch.empty(0, dtype=obj.dtype)
        like.set_(self._storages[address], obj.storage_offset(), obj.shape, obj.stride())
        self.tensors.append(like.requires_grad_(obj.requires_grad))
        return _left_out, (len(self.tensors) - 1,)


def _left_out(index: int) -> torch.Tensor:
    raise AssertionError("_TensorUnpickler replaces this function")


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that puts tensors in the places of the tensors that `_Pickler` has left out."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _left_out.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)
