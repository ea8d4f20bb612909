"""Writes a safetensors file one tensor after another, so that only one tensor needs memory of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from lightning_piper.checkpoint.safetensors_files import DTYPES, LENGTH

NAMES = {dtype: name for name, dtype in DTYPES.items()}  # the format's name of each dtype
ALIGNMENT = 8  # bytes; the first tensor begins at a multiple of this number


class SafetensorsWriter:
    """A safetensors file whose tensors are added in the order of its header.

    `add` never raises an error, because other processes may be waiting for the next exchange of tensors.
    `close` raises the first error of `add`.

    Args:
        path: The file, which must not exist.
        tensors: Name -> a tensor of this shape and dtype, for example on the meta device.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
            shape = list(tensor.shape)
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._size = LENGTH + len(text) + end
        self._error: Exception | None = None
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(LENGTH, "little") + text)

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor, which must have the shape and dtype that the constructor got. After an
        error, write nothing."""
        if self._error is None:
            try:
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                self._file.write(flat.view(torch.uint8).numpy().data)
            except Exception as error:
                self._error = error

    def close(self) -> int:
        """Flush the file to permanent storage, and return the size in bytes that a complete file has.

        Raises:
            Exception: The first error of `add`, or of the flush.
        """
        with self._file:
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._size
