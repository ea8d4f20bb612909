"""Serialization of objects for another process. The pickle leaves out large tensors, which are sent
separately.

So the bytes of a large tensor are never in memory twice.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

APART = 2**16  # bytes from which a tensor is sent separately

Place = tuple[int, torch.dtype, torch.Size]  # the tensor's number, dtype and shape


class _Outline(pickle.Pickler):
    """A pickler that leaves out large tensors. `tensors` has the tensors that were left out: `id` of a tensor
    -> (its `Place`, the tensor)."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        """Return the `Place` of a tensor that is sent outside of the pickle; None for any other object.

        Such a tensor has at least `APART` bytes. It is a plain, dense, contiguous CPU tensor without
        `requires_grad`.
        """
        if (
            type(obj) is not torch.Tensor
            or obj.device.type != "cpu"
            or obj.layout != torch.strided
            or obj.requires_grad
        ):
            return None
        if obj.nbytes < APART or not obj.is_contiguous() or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        index, _ = self.tensors.setdefault(id(obj), ((len(self.tensors), obj.dtype, obj.shape), obj))
        return index


class _Filled(pickle.Unpickler):
    """An unpickler that makes an uninitialized tensor for each tensor that `_Outline` left out. `tensors` has
    these tensors by number, the first entry of their `Place`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Place) -> torch.Tensor:
        number, dtype, shape = pid
        if number not in self.tensors:
            self.tensors[number] = torch.empty(shape, dtype=dtype)
        return self.tensors[number]


def outlined(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickle of an object, and the large tensors that the pickle leaves out, each once. These are
    the object's own tensors, not copies. The list is empty without large tensors."""
    file = io.BytesIO()
    pickler = _Outline(file)
    pickler.dump(value)
    return file.getvalue(), [tensor for _, tensor in pickler.tensors.values()]


def of_outline(outline: bytes) -> tuple[Any, list[torch.Tensor]]:
    """Return the object of a pickle, and its uninitialized tensors for the caller to fill, in the order of
    `outlined`."""
    pickler = _Filled(io.BytesIO(outline))
    value = pickler.load()
    return value, [pickler.tensors[number] for number in sorted(pickler.tensors)]
