"""Objects on their way to another process: an outline in pickle's form, and large tensors beside it, so that their bytes are never
there twice."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

APART = 2**16  # bytes of a tensor that is not a part of the outline

Place = tuple[int, torch.dtype, torch.Size]  # number among the tensors, and what is to be there


class _Outline(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}  # by identity

    def persistent_id(self, obj: Any) -> Place | None:
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
            return None
        if obj.nbytes < APART or not obj.is_contiguous() or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return None
        place, _ = self.tensors.setdefault(id(obj), ((len(self.tensors), obj.dtype, obj.shape), obj))
        return place


class _Filled(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Place) -> torch.Tensor:
        number, dtype, shape = pid
        if number not in self.tensors:
            self.tensors[number] = torch.empty(shape, dtype=dtype)
        return self.tensors[number]


def outlined(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The outline of an object, and the tensors that are no part of it."""
    file = io.BytesIO()
    pickler = _Outline(file)
    pickler.dump(value)
    return file.getvalue(), [tensor for _, tensor in pickler.tensors.values()]


def of_outline(outline: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The object, and its tensors that are still to be filled, in the order of `outlined`."""
    pickler = _Filled(io.BytesIO(outline))
    value = pickler.load()
    return value, [pickler.tensors[number] for number in sorted(pickler.tensors)]
