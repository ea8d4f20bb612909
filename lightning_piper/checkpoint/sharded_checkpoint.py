"""Sharded checkpoints: every process writes what it holds, and reads what it needs, under any program.

A checkpoint is a directory of

    __RANK_0.distcp   the tensor ranges that one process wrote
    .metadata         torch.distributed.checkpoint's table of the ranges
    meta.pt           all other content, which every process has
    manifest.json     size and checksum of every file, and shape of every tensor
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_piper.checkpoint.files import read_manifest, verify, verify_sizes, write_manifest
from lightning_piper.checkpoint.folders import Fingerprint, Folder, read
from lightning_piper.checkpoint.late_copies import LateCopies
from lightning_piper.checkpoint.locations import location_of
from lightning_piper.checkpoint.snapshot import snapshot
from lightning_piper.checkpoint.tensor_ranges import (
    METADATA,
    LoadRanges,
    Reader,
    SaveRanges,
    TensorRange,
    Writer,
)
from lightning_piper.errors import PiperError
from lightning_piper.holdings.placeholders import check_values
from lightning_piper.ir.values import TensorSpec, flattened, view_as
from lightning_piper.processes.world import World, of_rank, together

META = "meta.pt"


def save(
    path: str | os.PathLike[str],
    tensor_ranges: Sequence[TensorRange],
    common: dict[str, Any],
    world: World,
) -> None:
    """Write a complete checkpoint, or none. Collective.

    An earlier checkpoint of this name can be loaded until the new one is complete.

    Args:
        path: Path of the directory, or an address in a remote store. Rank 0's path is used.
        tensor_ranges: The ranges that this process holds. Ranges that several processes hold must be equal,
            and are written once.
        common: All other content. Rank 0's content is used.
        world: The processes that save together. They share the directory or the store.

    Raises:
        PiperError: On every process, if any process fails, or if no process holds some elements of a tensor.
    """
    Saving(path, tensor_ranges, common, world).write(world)


class Saving:
    """A checkpoint that is planned and still to be written. The constructor is collective.

    Args:
        path, tensor_ranges, common, world: The arguments of `save`.
        before: The previous checkpoint of these processes. Its plan is reused if all processes hold the same
            ranges again.
        copies: Makes copies of the content and of the data that this process is to write. Then `write` writes the
            copies.

    Raises:
        PiperError: On every process, if any process has content that cannot be saved, or if no process holds
            some elements of a tensor.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensor_ranges: Sequence[TensorRange],
        common: dict[str, Any],
        world: World,
        before: Saving | None = None,
        copies: LateCopies | None = None,
    ) -> None:
        self._location = location_of(world.broadcast(os.fspath(path)))
        self._doing = f"saving {self._location}"
        self._planner, self._writer = SaveRanges(tensor_ranges), Writer()
        # On rank 0: returns the content of `meta.pt`.
        self._common: Callable[[], dict[str, Any]] = lambda: common
        # On rank 0: the table of all ranges. On each process: its own plan.
        self._metadata, self._plan = Metadata({}), SavePlan([])
        # the ranges of this process, by which the next `Saving` sees whether the plan still fits
        self._held = [(part.key, part.start, part.stop, part.spec) for part in tensor_ranges]

        def begin() -> bool:
            """Check the content, and return whether this process can reuse the plan of `before`."""
            for part in tensor_ranges:
                _check_range(part)
            if world.is_rank_zero:
                check_values(common)
                if copies is not None:
                    self._common = snapshot(common, copies)
            return before is not None and before._held == self._held

        if all(together(world, self._doing, begin)):
            assert before is not None
            self._plan, self._metadata, self._planner.specs = (
                before._plan,
                before._metadata,
                before._planner.specs,
            )
        else:
            self._make_plan(world)
        if copies is not None:
            self._planner.copy(self._plan, copies)

    def _make_plan(self, world: World) -> None:
        """Let rank 0 make the plans of all processes from the ranges that they hold. Collective."""
        held = world.to_rank_zero(self._planner.create_local_plan())

        plans: list[SavePlan] = []

        def plan() -> None:
            if held is not None:
                divided, self._metadata = self._planner.create_global_plan(held)
                plans.extend(self._writer.prepare_global_plan(divided))

        together(world, self._doing, plan)
        self._plan = world.from_rank_zero(plans or None)

    def write(self, world: World) -> None:
        """Write the checkpoint. Collective over the processes that made it.

        Raises:
            PiperError: On every process, if any process fails.
        """
        try:
            self._write(world)
        except PiperError:
            if world.is_rank_zero:
                # Remaining files are never loaded, and the next save removes them.
                with suppress(Exception):
                    self._location.discard()
            raise
        finally:  # The next `Saving` may reuse the plan, but not the tensors.
            self._planner.release()
            self._common = dict

    def _write(self, world: World) -> None:
        """Write the parts of all processes and the other files into a new folder, and publish it.
        Collective."""
        own = f"__{world.rank}_0.distcp"
        written: list[WriteResult] = []
        begun: list[Folder] = []  # on rank 0: the folder

        def begin() -> tuple[str, Fingerprint] | None:
            if not world.is_rank_zero:
                return None
            begun.append(self._location.begin())
            content = io.BytesIO()
            torch.save(self._common(), content)
            with begun[0].create(META) as file:
                file.write(content.getbuffer())
            return str(begun[0]), file.fingerprint

        def write() -> Fingerprint:
            written.extend(self._writer.write_data(self._plan, self._planner).wait())
            file = self._writer.files[own]
            chunks = {(start, size) for start, size, _ in file.parts}
            assert chunks.issuperset((x.storage_data.offset, x.storage_data.length) for x in written)
            return file.fingerprint

        first = together(world, self._doing, begin)[0]
        assert first is not None
        folder = begun[0] if begun else self._location.opened(first[0])
        self._writer.write_into(folder, world.is_rank_zero)
        found = together(world, self._doing, write)
        results = world.to_rank_zero((written, self._writer.files[own].parts))

        def finish() -> None:
            """On rank 0, write the metadata and the manifest, and give the checkpoint its name."""
            if results is None:
                return
            self._writer.finish(self._metadata, [done for done, _ in results])
            files = {f"__{rank}_0.distcp": value for rank, value in enumerate(found)}
            files |= {METADATA: self._writer.files[METADATA].fingerprint, META: first[1]}
            chunks = {f"__{rank}_0.distcp": rows for rank, (_, rows) in enumerate(results)}
            content = {"id": uuid.uuid4().hex, "processes": world.size, "tensors": self._planner.specs}
            write_manifest(folder, {**content, "chunks": chunks}, files)
            self._location.publish(folder)

        together(world, self._doing, finish)


def _check_range(part: TensorRange) -> None:
    """Check that a range is inside of its tensor, and that its values are flat and as many."""
    numel = math.prod(part.shape)
    if not 0 <= part.start <= part.stop <= numel:
        raise PiperError(
            f"{part.key} has {numel} elements, but the range {part.start}:{part.stop} is given. Give a range of these "
            "elements [PIPER-K013]"
        )
    if part.tensor.shape != (part.stop - part.start,):
        raise PiperError(
            f"elements {part.start}:{part.stop} of {part.key}, whose shape is {list(part.shape)}, are given "
            f"as a tensor of shape {list(part.tensor.shape)}. Give a tensor with one dimension and the same "
            "number of elements [PIPER-K013]"
        )


def _loaded(world: World, doing: str, reader: Reader, planner: LoadRanges) -> None:
    """Read with `torch.distributed.checkpoint`. If a process fails, all processes raise the error.

    The error names the lowest rank that failed.
    """
    try:
        with warnings.catch_warnings():
            # With one process, dcp warns that it works without process groups. That is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            group = world.host_group if world.size > 1 else None
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=world.size == 1)
    except dcp.CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        text = (
            str(first)
            if isinstance(first, PiperError)
            else f"{doing} failed on rank {rank}: {type(first).__name__}: {first} [PIPER-L001]"
        )
        raise of_rank(rank, PiperError(text)) from first


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint from which ranges of tensors can be read.

    Attributes:
        path: The absolute path, or the address, that the user gave.
        common: All content but the tensors.
        tensors: Key of a tensor -> `TensorRange.spec`.
    """

    path: str
    common: dict[str, Any]
    tensors: Mapping[str, dict[str, Any]]

    def read(self, ranges: Sequence[TensorRange], world: World) -> None:
        """Read ranges, in the order of the elements when they were saved. Collective."""
        raise NotImplementedError

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor was saved. Raise a PiperError if the checkpoint does not have
        it."""
        dtype = getattr(torch, self._tensor(key)["dtype"])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def spec_of(self, key: str) -> TensorSpec:
        """Return the spec that a tensor had when it was saved. Raise a PiperError if the checkpoint does not
        have it."""
        shape = tuple(self._tensor(key)["shape"])
        runs = self._tensor(key).get("runs")
        strides = _strides(shape, self._tensor(key)["layout"])
        return TensorSpec(shape, self.dtype_of(key), strides, None if runs is None else tuple(runs))

    def _tensor(self, key: str) -> dict[str, Any]:
        found = self.tensors.get(key)
        if found is None:
            raise PiperError(
                f"the checkpoint {self.path} does not have {key}. Load it into the module from which it was "
                "saved, with the same optimizer [PIPER-K003]"
            )
        return found


@dataclass(frozen=True)
class VerifiedCheckpoint(OpenedCheckpoint):
    """A checkpoint whose files are verified.

    Attributes:
        folder: The folder of the checkpoint's files.
        manifest: The entries of the checkpoint's manifest.
    """

    folder: Folder
    manifest: dict[str, Any]

    def read(self, ranges: Sequence[TensorRange], world: World) -> None:
        """Read ranges, in the order of the elements when they were saved. Collective."""
        reader = Reader(self.folder, self.manifest.get("chunks") if self.folder.is_remote else None)
        _loaded(world, f"loading {self.path}", reader, LoadRanges(ranges))


def load(
    path: str | os.PathLike[str], wanted: Sequence[TensorRange], world: World, weights_only: bool = True
) -> dict[str, Any]:
    """Read a checkpoint, whatever the program under which it was saved. Collective.

    Args:
        path: Path of the directory, or an address in a remote store.
        wanted: The ranges whose tensors are filled, in their own dtypes and on their own devices.
        world: The processes that load together. They share the directory or the store.
        weights_only: Raise an error for content that could run code. Only `common` may contain such content.

    Returns:
        The content that was passed to `save` as `common`, in host memory.

    Raises:
        PiperError: On every process, if any process finds no checkpoint, a damaged file, content that
            `weights_only` forbids, or no tensor of a wanted key and shape, or if processes find different
            checkpoints.
    """
    opened = open_checkpoint(path, world, weights_only)
    fill(opened, wanted, world)
    return opened.common


def open_checkpoint(
    path: str | os.PathLike[str], world: World, weights_only: bool = True
) -> VerifiedCheckpoint:
    """Verify a checkpoint's files, and read all but its tensors. The processes divide the files. In a remote
    store, only the sizes of files with tensors are verified, because `fill` verifies each chunk that it reads.
    Collective.

    Raises:
        PiperError: On every process, if any process finds no checkpoint, a damaged file or content that
            `weights_only` forbids, or if the processes find different checkpoints.
    """
    location = location_of(path)
    doing = f"loading {location}"
    folders: list[Folder] = []
    manifest: dict[str, Any] = {}
    common: dict[str, Any] = {}

    def begin() -> str:
        folders.append(location.folder())
        manifest.update(read_manifest(folders[0]))
        return str(manifest["id"])

    if len(set(together(world, doing, begin))) > 1:
        raise PiperError(
            f"the processes find different checkpoints under {location}. Give all processes the same directory"
            " [PIPER-K004]"
        )
    folder = folders[0]
    together(world, doing, lambda: _verify(folder, manifest, world))
    together(world, doing, lambda: common.update(_read_common(folder, weights_only)))
    return VerifiedCheckpoint(str(location), common, manifest["tensors"], folder, manifest)


def _verify(folder: Folder, manifest: dict[str, Any], world: World) -> None:
    """Check this process's share of the files."""
    files = manifest["files"]
    own = sorted(files)[world.rank :: world.size]
    later = [name for name in own if folder.is_remote and name in manifest.get("chunks", {})]
    verify_sizes(folder, files, later)
    verify(folder, files, [name for name in own if name not in later])


def _read_common(folder: Folder, weights_only: bool) -> dict[str, Any]:
    """Read the content that every process has.

    Raises:
        PiperError: The content has classes that `weights_only` forbids.
    """
    path = folder.path_of(META)
    try:
        content = torch.load(io.BytesIO(read(folder, META)), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # torch's text about a class
        raise PiperError(
            f"{path} has {found[1] if found else 'an object'}, which weights_only=True does not load. If you trust the "
            "checkpoint, pass weights_only=False to the call that loads it, such as trainer.fit (on the command line: "
            "--unsafe) [PIPER-K007]"
        ) from error
    assert isinstance(content, dict)
    return content


def fill(opened: OpenedCheckpoint, wanted: Sequence[TensorRange], world: World) -> None:
    """Read the wanted ranges of a checkpoint into their tensors, whose dtypes and devices may differ from the
    saved ones. If a tensor's elements have another order in memory than when they were saved, the process
    reads the whole tensor into host memory. Collective.

    Raises:
        PiperError: On every process, if the checkpoint does not have a tensor that any process wants, has it
            in another shape, or cannot be read.
    """
    doing = f"loading {opened.path}"
    together(world, doing, lambda: _check_wanted(opened, wanted))
    direct, relaid = [], []
    whole: dict[str, TensorRange] = {}
    for part in wanted:
        if _order(part.spec) == _order(opened.tensors[part.key]):
            direct.append(part)
            continue
        # Elements have another order in the file, so the whole tensor is necessary to reorder them.
        if part.key not in whole:
            numel = math.prod(part.shape)
            whole[part.key] = TensorRange(
                part.key, part.shape, 0, numel, torch.empty(numel, dtype=part.tensor.dtype)
            )
        relaid.append(part)
    opened.read([*direct, *whole.values()], world)
    for part in relaid:
        tensor = view_as(whole[part.key].tensor, opened.spec_of(part.key))
        target = TensorSpec(part.shape, tensor.dtype, _strides(part.shape, part.dim_order), part.runs)
        part.tensor.detach().copy_(flattened(tensor, target)[part.start : part.stop])


def _check_wanted(opened: OpenedCheckpoint, wanted: Sequence[TensorRange]) -> None:
    """Check that the checkpoint has each wanted tensor, in the wanted shape."""
    for part in wanted:
        _check_range(part)
        shape = list(opened.spec_of(part.key).shape)
        if shape != list(part.shape):
            raise PiperError(
                f"{part.key} has shape {shape} in the checkpoint {opened.path}, but {list(part.shape)} here. "
                "Load it into a module of the same sizes [PIPER-K003]"
            )


def _order(spec: dict[str, Any]) -> tuple[list[int], Any]:
    """Return the order of the dimensions in memory, without dimensions of size 1, and the runs.

    Dimensions of size 1 have no effect on the order of elements.
    """
    return [d for d in spec["layout"] if spec["shape"][d] != 1], spec.get("runs")


def _strides(shape: Sequence[int], dim_order: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides of a dense tensor. `dim_order` has its dimensions from the slowest to the fastest in
    memory; None: row-major order."""
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape)) if dim_order is None else dim_order):
        strides[d], step = step, step * max(1, shape[d])
    return tuple(strides)


def read_whole(opened: OpenedCheckpoint, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return key -> whole tensor in host memory, in its saved dtype and with its saved dimension order. Not
    collective. Raise a PiperError if the checkpoint does not have a key."""
    specs = {key: opened.spec_of(key) for key in keys}
    flat = {key: torch.empty(spec.numel, dtype=spec.dtype) for key, spec in specs.items()}
    tensor_ranges = [
        TensorRange(key, spec.shape, 0, spec.numel, flat[key], spec.dim_order, spec.runs)
        for key, spec in specs.items()
    ]
    fill(opened, tensor_ranges, World(0, 1, torch.device("cpu")))
    return {key: view_as(flat[key], spec) for key, spec in specs.items()}
