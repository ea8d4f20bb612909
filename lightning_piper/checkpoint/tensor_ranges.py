"""Ranges of tensors in the files of `torch.distributed.checkpoint`.

In the files, each key has a tensor of one dimension in chunks, whatever the tensor's real shape. The files do
not depend on which process held which range. Saving makes chunks from the ranges of all processes together,
and a loading process reads the chunks that overlap its own ranges.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
    filesystem,
    metadata,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from lightning_piper.checkpoint.files import other_content
from lightning_piper.checkpoint.folders import Folder, SummedFile
from lightning_piper.checkpoint.late_copies import LateCopies
from lightning_piper.errors import PiperError

# Largest number of elements of a chunk. A chunk is read whole, so a process reads up to this many unneeded
# elements at either end of its range. A chunk also costs about a kilobyte of metadata.
CHUNK = 1 << 22
METADATA = ".metadata"  # name of torch's table of chunks
DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")  # names of files with tensors


@dataclass(frozen=True)
class TensorRange:
    """A range of a tensor.

    Attributes:
        key: The key of the tensor, the same in all processes.
        shape: The shape of the whole tensor.
        start, stop: The range has the elements `start:stop`, in the order in which they lie in memory.
        tensor: The values of these elements, in one dimension, on any device.
        dim_order: The dimensions of the whole tensor from the slowest to the fastest in memory; None if
            they are in order.
        runs: The field `runs` of the whole tensor's `TensorSpec`.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    dim_order: tuple[int, ...] | None = None
    runs: tuple[int, int] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """Shape, order in memory and dtype of the whole tensor, in JSON."""
        dim_order = range(len(self.shape)) if self.dim_order is None else self.dim_order
        runs = {} if self.runs is None else {"runs": list(self.runs)}
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return {"shape": list(self.shape), "layout": list(dim_order), **runs, "dtype": dtype}


class SaveRanges(SavePlanner):
    """A planner that decides which process writes which elements.

    If several processes hold an element, one of them writes it. These processes share the work.

    Attributes:
        specs: Key -> `TensorRange.spec`. Filled on the coordinating process when the plan is made.
    """

    def __init__(self, tensor_ranges: Sequence[TensorRange]) -> None:
        self._parts: dict[str, list[TensorRange]] = {}
        for part in tensor_ranges:
            self._parts.setdefault(part.key, []).append(part)
        self.specs: dict[str, dict[str, Any]] = {}

    def copy(self, plan: SavePlan, copies: LateCopies) -> None:
        """Let `copies` copy the data that this process is to write. Then `resolve_data` returns the copies."""
        items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            items.setdefault(item.index.fqn, []).append(item)
        self._parts = {key: self._parts[key] for key in items}
        for key, of_key in items.items():
            copies.do([part.tensor for part in self._parts[key]], partial(self._copy, key, of_key, copies))

    def _copy(self, key: str, items: Sequence[WriteItem], copies: LateCopies) -> None:
        """Replace the ranges of one tensor by copies of the data of some items."""
        shape = self._parts[key][0].shape
        self._parts[key] = [
            TensorRange(key, shape, *_range(item), copies.copied(self.resolve_data(item))) for item in items
        ]

    def release(self) -> None:
        """Drop the tensors after they are written."""
        self._parts = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one item for each range that this process holds, and with the specs of the whole
        tensors."""
        items = [
            _write_item(p.key, p.start, p.stop, math.prod(p.shape), p.tensor.dtype)
            for ps in self._parts.values()
            for p in ps
        ]
        return SavePlan(
            items, planner_data={key: tensor_ranges[0].spec for key, tensor_ranges in self._parts.items()}
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of each process and the metadata: divide the elements among the processes.

        Raises:
            PiperError: The specs of a tensor differ between ranks, or no process holds some elements.
        """
        for rank, plan in enumerate(all_plans):
            for key, spec in plan.planner_data.items():
                if self.specs.setdefault(key, spec) != spec:
                    raise PiperError(
                        f"saving a sharded checkpoint: {key} is {spec} on rank {rank}, but {self.specs[key]} on "
                        "a lower rank. Give it one shape and dtype on all ranks [PIPER-K013]"
                    )
        plans = [
            replace(plan, items=items, planner_data=None)
            for plan, items in zip(all_plans, _divided(all_plans), strict=True)
        ]
        return create_default_global_save_plan(plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        start, stop = _range(write_item)
        for part in self._parts[write_item.index.fqn]:
            if part.start <= start and stop <= part.stop:
                return part.tensor.detach()[start - part.start : stop - part.start]
        raise AssertionError(f"this process does not hold {write_item.index}")


def _write_item(key: str, start: int, stop: int, numel: int, dtype: torch.dtype) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size([numel]))
    return WriteItem(MetadataIndex(key, [start]), WriteItemType.SHARD, tensor_data=data)


def _range(item: WriteItem) -> tuple[int, int]:
    assert item.tensor_data is not None
    start = item.tensor_data.chunk.offsets[0]
    return start, start + item.tensor_data.chunk.sizes[0]


def _divided(plans: Sequence[SavePlan]) -> list[list[WriteItem]]:
    """Return, for each rank, the chunks that it writes. `plans` has the ranges that each process holds.

    Raises:
        PiperError: No process holds some elements.
    """
    held: dict[str, list[tuple[int, int, int]]] = {}
    examples: dict[str, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            held.setdefault(item.index.fqn, []).append((*_range(item), rank))
            examples[item.index.fqn] = item
    chunks = [
        (key, *chunk) for key, ranges in sorted(held.items()) for chunk in _chunks(key, ranges, examples[key])
    ]
    chunks.sort(key=lambda chunk: len(chunk[3]) > 1)  # first the chunks that only one process can write
    result: list[list[WriteItem]] = [[] for _ in plans]
    written = [0] * len(plans)
    for key, start, stop, ranks in chunks:
        data = examples[key].tensor_data
        assert data is not None
        rank = min(ranks, key=written.__getitem__)
        written[rank] += (stop - start) * data.properties.dtype.itemsize
        result[rank].append(_write_item(key, start, stop, data.size[0], data.properties.dtype))
    return result


def _chunks(
    key: str, ranges: list[tuple[int, int, int]], example: WriteItem
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield start, stop and holders of each chunk of a tensor.

    Chunks are cut where the range of any process begins or ends, and every `CHUNK` elements.

    Args:
        ranges: Start, stop and rank of each range that a process holds.
        example: An item of the tensor, which has its number of elements.

    Raises:
        PiperError: No process holds some elements.
    """
    assert example.tensor_data is not None
    numel = example.tensor_data.size[0]
    if not numel:
        yield 0, 0, tuple(sorted({rank for _, _, rank in ranges}))
        return
    cuts = sorted(
        {0, numel, *range(0, numel, CHUNK), *(x for start, stop, _ in ranges for x in (start, stop))}
    )
    waiting = sorted(ranges, reverse=True)
    holding: list[tuple[int, int, int]] = []
    for start, stop in itertools.pairwise(cuts):
        while waiting and waiting[-1][0] <= start:
            holding.append(waiting.pop())
        holding = [x for x in holding if x[1] > start]
        if not holding:
            raise PiperError(
                f"saving a sharded checkpoint: no process holds elements {start}:{stop} of {key}, which has "
                f"{numel} elements. Save with checkpoint='consolidated', and report this [PIPER-K013]"
            )
        yield start, stop, tuple(sorted({rank for _, _, rank in holding}))


class LoadRanges(LoadPlanner):
    """A planner of the chunks that this process reads: all chunks that overlap its ranges."""

    def __init__(self, tensor_ranges: Sequence[TensorRange]) -> None:
        self._parts: dict[str, list[TensorRange]] = {}
        for part in tensor_ranges:
            if part.start < part.stop:
                self._parts.setdefault(part.key, []).append(part)
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return a plan that reads the chunks that overlap this process's ranges."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, tensor_ranges in self._parts.items():
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            ranges = [
                ChunkStorageMetadata(torch.Size([p.start]), torch.Size([p.stop - p.start]))
                for p in tensor_ranges
            ]
            items += create_read_items_for_chunk_list(key, stored, ranges)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        part, offset = self._parts[index.fqn][index.index], read_item.dest_offsets[0]
        return part.tensor.detach()[offset : offset + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # the values were read into a view of the range's tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are saved")


class Writer(FileSystemWriter):
    """A writer of one file for each process. It leaves the path out of the metadata, because the path may be a
    temporary name.

    Attributes:
        files: Name -> checksums of each file that was written.
    """

    def __init__(self) -> None:
        super().__init__(".", sync_files=False)  # `Folder.create` flushes files
        self.files: dict[str, SummedFile] = {}

    def write_into(self, folder: Folder, coordinates: bool) -> None:
        """Write into this folder from now on."""
        self.files = {}
        self.fs = _Files(folder, self.files)
        self.set_up_storage_writer(coordinates)

    def storage_meta(self) -> StorageMeta | None:
        return None


class Reader(FileSystemReader):
    """A reader of files of one folder only, which runs no code from the metadata file.

    Args:
        folder: The folder.
        chunks: The manifest's table of chunks, to compare each chunk that is read; None to compare nothing.
    """

    def __init__(self, folder: Folder, chunks: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        super().__init__(".")
        self._folder = folder
        self._crcs = (
            None
            if chunks is None
            else {(name, start, size): crc for name, rows in chunks.items() for start, size, crc in rows}
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of a checkpoint, and check it.

        Raises:
            PiperError: The file has something else, or names data files that do not belong to a sharded
                checkpoint.
        """
        path = self._folder.path_of(METADATA)
        with self._folder.open(METADATA) as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise PiperError(
                f"{path} does not belong to a sharded checkpoint. Use another checkpoint [PIPER-K002]"
            )
        for info in found.storage_data.values():
            name = getattr(info, "relative_path", None)
            if not isinstance(name, str) or not DATA.fullmatch(name):
                raise PiperError(
                    f"{path} lists the data file {name!r}. Sharded checkpoints have only files such as "
                    "'__0_0.distcp', so Piper does not load this one. Use another checkpoint [PIPER-K002]"
                )
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk of a plan once, and nothing else.

        Raises:
            PiperError: A chunk does not have the content that was saved.
        """
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        chunks = sorted(wanted)
        ranges = [(name, start, start + size) for name, start, size in chunks]
        for chunk, content in zip(chunks, self._folder.ranges(ranges), strict=True):
            self._check(chunk, content)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for item in wanted[chunk]:
                target = planner.resolve_tensor(item).detach()
                start, count = item.storage_offsets[0], item.lengths[0]
                target.copy_(tensor[start : start + count])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check(self, chunk: tuple[str, int, int], content: bytes) -> None:
        name, start, size = chunk
        if self._crcs is None:
            return
        if chunk not in self._crcs:
            raise PiperError(
                f"{self._folder.path_of(name)}: the manifest does not list the chunk {start}:{start + size}. Use "
                "another checkpoint [PIPER-K002]"
            )
        if (found := zlib.crc32(content)) != self._crcs[chunk]:
            where = f" in bytes {start}:{start + size}"
            raise other_content(self._folder.path_of(name), found, self._crcs[chunk], where)


class _Files(filesystem.FileSystem):
    """The files of a `Folder`, as torch writes them.

    torch writes the metadata under a temporary name and renames the file. That is not necessary here, because
    the folder is not complete until it has its manifest.
    """

    def __init__(self, folder: Folder, files: dict[str, SummedFile]) -> None:
        super().__init__()
        self._folder, self._files = folder, files

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix.removesuffix(".tmp")

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with self._folder.create(os.fspath(path)) as file:
            yield file  # type: ignore[misc]
            file.tell()
        self._files[os.fspath(path)] = file

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """A reader of metadata that accepts only dcp's data classes, shapes, dtypes and a layout."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an accepted class, dtype or function. Raise a PiperError for any other name."""
        if module == "torch.serialization":
            # Stands for the only function of that module that metadata may call.
            return _layout
        if module in (metadata.__name__, filesystem.__name__, "torch") and "." not in name:
            found = super().find_class(module, name)
            if found is torch.Size or isinstance(found, torch.dtype):
                return found
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise PiperError(
            f"the checkpoint's .metadata names {module}.{name}, which does not belong there, so it is "
            "not loaded. Use another checkpoint [PIPER-K002]"
        )


def _layout(name: str) -> torch.layout:
    return torch.strided
