"""Reads ranges of tensors from safetensors files, one file or several with an index.

A file has eight bytes with the length of its header, the header in JSON, and the tensors' bytes in row-major
order. So a process can read any range of elements without the elements around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_piper.errors import PiperError
from lightning_piper.ir.values import TensorSpec, flattened

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH = 8  # bytes of the header's length
LARGEST = 100_000_000  # bytes of a header, the limit of the format
DTYPES = {  # name of a dtype in the format -> the dtype
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: The file.
        key: The tensor's name in the file.
        dtype: The tensor's dtype in the file.
        shape: The tensor's shape.
        offset: Position in the file of the tensor's first byte.
    """

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def whole(self) -> torch.Tensor:
        """Return a new tensor of all elements in host memory, in the file's dtype."""
        return self._elements(0, math.prod(self.shape)).view(self.shape)

    def read(self, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Return the elements `start:stop` of `flattened(self.whole(), spec)`: a new tensor of one dimension
        in host memory, in the file's dtype. If `spec` has another dimension order than the file, this reads
        the whole tensor."""
        if spec.dim_order != tuple(range(len(self.shape))):
            return flattened(self.whole(), spec)[start:stop].clone()
        pieces = [self._elements(*piece) for piece in _pieces(spec, start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat([self._elements(0, 0), *pieces])

    def _elements(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        data = read_bytes(self.path, self.offset + start * size, (stop - start) * size)
        return torch.frombuffer(data, dtype=self.dtype)


def _pieces(spec: TensorSpec, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, end) in row-major order whose elements are, one after another, `start:stop` in
    the order of a spec."""
    if spec.runs is None:
        yield start, stop
        return
    runs, parts = spec.runs
    length = spec.numel // (runs * parts)
    while start < stop:
        block, inside = divmod(start, length)
        part, run = divmod(block, runs)
        count = min(length - inside, stop - start)
        first = (run * parts + part) * length + inside
        yield first, first + count
        start += count


def read_bytes(path: Path, offset: int, count: int) -> bytearray:
    """Return `count` bytes of a file from position `offset` on.

    Raises:
        PiperError: The file is missing, unreadable or too short.
    """
    data = bytearray(count)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            view, done = memoryview(data), 0
            while done < count and (got := file.readinto(view[done:])):
                done += got
    except OSError as error:
        raise PiperError(
            f"the weights in {path} cannot be read: {error}. Give a folder with all files of the model, which every "
            "process sees [PIPER-K008]"
        ) from error
    if done < count:
        raise _damaged(path, "it ends too early")
    return data


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a folder, by their names in the files. If the folder has
    `SINGLE`, only this file counts. This reads headers, and no tensor's elements.

    Raises:
        PiperError: The files are missing or damaged, or differ from their index.
    """
    if (folder / SINGLE).is_file():
        return _tensors_of(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise PiperError(
            f"{folder} has neither {SINGLE} nor {INDEX}. Give the folder of a model that "
            "save_pretrained has written with safetensors [PIPER-K008]"
        )
    try:
        listed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(listed.values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder / INDEX, f"its weight_map cannot be read ({error})") from error
    if outside:
        raise PiperError(
            f"{folder / INDEX} names the file {outside[0]!r}, but Piper reads only files next to the index. Move the file "
            "there, and correct its name in the index [PIPER-K008]"
        )
    found: dict[str, StoredTensor] = {}
    for name in names:
        own = _tensors_of(folder / name)
        wanted = {key for key, file in listed.items() if file == name}
        if own.keys() != wanted:
            key = sorted(own.keys() ^ wanted)[0]
            raise PiperError(
                f"{folder / INDEX} and {folder / name} do not fit together: only {name if key in own else INDEX} has "
                f"{key!r}. Copy or download both again, from the same version of the model [PIPER-K008]"
            )
        found |= own
    return found


class _Entry:
    """An entry of a header: a tensor's dtype (by the format's name) and shape, and the range of its bytes.
    The bytes are counted from the end of the header, and `last` is not part of the range."""

    def __init__(self, key: str, found: dict[str, Any]) -> None:
        self.key, self.dtype = key, str(found["dtype"])
        self.shape = tuple(map(int, found["shape"]))
        self.first, self.last = map(int, found["data_offsets"])


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, after a check of its header.

    Raises:
        PiperError: The file is damaged, or has a dtype that Piper does not read.
    """
    length = int.from_bytes(read_bytes(path, 0, LENGTH), "little")
    size, begin = path.stat().st_size, LENGTH + length
    if length > LARGEST or begin > size:
        raise _damaged(path, "its header does not fit into the file")
    try:
        header: dict[str, Any] = json.loads(read_bytes(path, LENGTH, length))
        header.pop("__metadata__", None)
        entries = [_Entry(key, each) for key, each in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from error
    found = {}
    for each in entries:
        if each.dtype not in DTYPES:
            raise PiperError(
                f"{path}: the tensor {each.key!r} has the dtype {each.dtype}, which Piper does not read. "
                "Save the model in float32, float16 or bfloat16 [PIPER-K008]"
            )
        dtype = DTYPES[each.dtype]
        nbytes = math.prod(each.shape) * dtype.itemsize
        if (
            min(0, *each.shape, each.first) < 0
            or each.last - each.first != nbytes
            or begin + each.last > size
        ):
            raise _damaged(path, f"the tensor {each.key!r} does not fit into the file")
        found[each.key] = StoredTensor(path, each.key, dtype, each.shape, begin + each.first)
    return found


_POINTER = b"version https://git-lfs"  # the first bytes of a file that Git LFS has not downloaded


def _damaged(path: Path, why: str) -> PiperError:
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return PiperError(
                f"{path} is a pointer of Git LFS, and not the weights. Run `git lfs pull` in its folder [PIPER-K008]"
            )
    return PiperError(f"{path} is damaged: {why}. Copy or download it again [PIPER-K008]")
