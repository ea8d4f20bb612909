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

SMALL = 2**10  # bytes up to which `dumps` puts the bytes of a tensor into the pickle

Place = tuple[int, torch.dtype, torch.Size]  # the tensor's number, dtype and shape


def _is_plain(x: Any) -> bool:
    """Return whether an object is a dense, contiguous CPU tensor without `requires_grad`."""
    if type(x) is not torch.Tensor or x.device.type != "cpu" or x.layout != torch.strided:
        return False
    return x.is_contiguous() and not (x.requires_grad or x.is_quantized or x.is_conj() or x.is_neg())


class _Small(pickle.Pickler):
    """A pickler that writes small tensors as bytes. torch's own pickle of a tensor takes about 0.1 ms."""

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain(obj) or not 0 < obj.nbytes <= SMALL or vars(obj):
            return NotImplemented
        return _tensor, (obj.dtype, tuple(obj.shape), obj.reshape(-1).view(torch.uint8).numpy().tobytes())


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def dumps(value: Any) -> bytes:
    """Return the pickle of an object, which `pickle.loads` reads."""
    file = io.BytesIO()
    _Small(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


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
        if not _is_plain(obj) or obj.nbytes < APART:
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
