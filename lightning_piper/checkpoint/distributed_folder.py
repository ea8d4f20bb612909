"""Reads the folders that Lightning's `FSDPStrategy` and `ModelParallelStrategy` save, as plain Lightning
checkpoints.

Such a folder has `meta.pt` with everything besides tensors, and the files of `torch.distributed.checkpoint`:
the module's tensors under `model` (FSDP) or `state_dict`, and each optimizer's state under `optimizer_0`,
`optimizer_1`, with the names of parameters. A plain checkpoint has numbers of parameters instead.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_piper.checkpoint.foreign_folders import keys_of
from lightning_piper.checkpoint.records import check_archive, check_records
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World

_MODULE = ("model", "state_dict")


def is_distributed(path: Path) -> bool:
    """Return whether a path is a folder that these strategies of Lightning have saved. A sharded checkpoint of this
    package has the same files, but its `meta.pt` has `state_dict`."""
    if not ((path / "meta.pt").is_file() and (path / ".metadata").is_file()):
        return False
    return "state_dict" not in keys_of((path / "meta.pt").read_bytes())


def read_distributed(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the content of such a folder as a plain Lightning checkpoint, with all tensors in host memory.

    `.metadata` is a pickle, which `weights_only` does not restrict.

    Args:
        weights_only: Reject content of `meta.pt` that could run code.

    Raises:
        PiperError: A file is damaged, has content that `weights_only` forbids, or does not have the module.
    """
    check_records(path / "meta.pt", World(0, 1, torch.device("cpu")))
    metadata, items = _metadata(path)
    _check_items(path, items)
    try:
        content: dict[str, Any] = torch.load(path / "meta.pt", "cpu", weights_only=weights_only)
        flat = {key: _room(of) for key, of in metadata.state_dict_metadata.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this process reads alone
            dcp.load(flat, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise _unreadable(path, error, weights_only) from error
    saved = _nested(flat, metadata)
    name = next((name for name in _MODULE if name in saved), None)
    if name is None:
        raise PiperError(
            f"{path} has {', '.join(map(repr, sorted(saved))) or 'no tensors'}, but not the module ('model' or 'state_dict'). "
            "Give a folder that FSDPStrategy or ModelParallelStrategy has saved [PIPER-K002]"
        )
    optimizers = [f"optimizer_{i}" for i in range(sum(key.startswith("optimizer_") for key in saved))]
    states = [_numbered(saved.get(key, {}), f"{path}: the state of {key!r}") for key in optimizers]
    return {**content, "state_dict": saved[name], "optimizer_states": states}


class _SavedItem(NamedTuple):
    """The place of a saved tensor or object.

    Attributes:
        file: The name of its file in the folder.
        start, length: Its bytes in the file.
        name: Its key.
    """

    file: str
    start: int
    length: int
    name: str


def _metadata(path: Path) -> tuple[Metadata, list[_SavedItem]]:
    """Return the content of `.metadata`, which has no checksum, and the places of all saved items.

    Raises:
        PiperError: It cannot be read, or does not have the entries of such a file.
    """
    try:
        found = dcp.FileSystemReader(path).read_metadata()
        known = found.state_dict_metadata.keys()
        items = sorted(
            _SavedItem(str(info.relative_path), int(info.offset), int(info.length), str(index.fqn))
            for index, info in found.storage_data.items()
        )
        whole = known == {item.name for item in items}
        whole = whole and (not found.planner_data or found.planner_data.keys() == known)
        absent = sorted({item.file for item in items if not (path / item.file).is_file()})
    except Exception as error:  # a damaged pickle may raise anything
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
    else:
        if absent:
            raise PiperError(
                f"{path} does not have the file {absent[0]!r}, which its file .metadata names. Copy the whole folder, or use "
                "another checkpoint [PIPER-K002]"
            )
        if whole:
            return found, items
        cause = "its entries contradict each other"
    raise PiperError(f"{path / '.metadata'} cannot be read ({cause}). Use another checkpoint [PIPER-K002]")


class _FileRange(io.RawIOBase):
    """A file that is a range of another file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("the position is before the start of the file")
        return self._at

    def readinto(self, room: Any) -> int:
        self._file.seek(self._start + self._at)
        found = self._file.read(max(0, min(len(room), self._length - self._at)))
        room[: len(found)] = found
        self._at += len(found)
        return len(found)


def _check_items(path: Path, items: Sequence[_SavedItem]) -> None:
    """Check each item of a folder against its CRC-32. `torch.distributed.checkpoint` saves each item as a zip archive
    of `torch.save`. Folders without checksums pass.

    Raises:
        PiperError: An item is damaged. The message names it and its file.
    """
    without = []
    for item in items:
        name = f"{path / item.file} ({item.name})"
        with (path / item.file).open("rb") as file:
            if not check_archive(io.BufferedReader(_FileRange(file, item.start, item.length)), name):
                without.append(name)
    if 0 < len(without) < len(items):
        raise PiperError(
            f"{without[0]} does not have the content that was saved: it is not an archive of torch.save. Use another "
            "checkpoint [PIPER-K002]"
        )


def _unreadable(path: Path, error: BaseException, weights_only: bool) -> PiperError:
    """Return the error for a folder that torch cannot read."""
    if isinstance(error, CheckpointException):  # its text has stack traces
        error, *_ = next(iter(error.failures.values()))
    forbidden = None
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path / "meta.pt"):
        forbidden = re.search(
            r"GLOBAL (\S+)", str(error)
        )  # torch writes "weights_only" into every such error
    if forbidden is not None:
        return PiperError(
            f"{path / 'meta.pt'} has {forbidden[1]}, which weights_only=True does not load. If you trust the "
            "checkpoint, convert it with weights_only=False (on the command line: --unsafe) [PIPER-K007]"
        )
    if isinstance(error, ImportError) or str(error).startswith("Can't get attribute"):  # pickle's
        return PiperError(
            f"{path} has an object whose class cannot be imported: {error}. Convert it in a script that defines or "
            "imports this class in the same way as the training did [PIPER-K007]"
        )
    if isinstance(error, AttributeError) and not weights_only:  # of the method that restores the object
        return PiperError(
            f"{path} has an object that cannot be read: {error}. Convert it in a script that defines or imports its "
            "class in the same way as the training did [PIPER-K007]"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return PiperError(
            f"{path} cannot be read, because this process has too little memory for its tensors. Read it on a machine with "
            "more memory [PIPER-K002]"
        )
    # Around this line, torch recommends weights_only=False, which does not help.
    cause = str(error).split("WeightsUnpickler error:")[-1].strip().partition("\n")[0].rstrip(".")
    return PiperError(
        f"{path} cannot be read ({type(error).__name__}: {cause}). Use another checkpoint [PIPER-K002]"
    )


def _room(of: Any) -> torch.Tensor | None:
    """Return memory for a saved tensor; None for another object."""
    return torch.empty(of.size, dtype=of.properties.dtype) if isinstance(of, TensorStorageMetadata) else None


def _nested(flat: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return values in the dicts and lists from which they were saved."""
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        *outer, last = paths.get(key, (key,))
        inner = root
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    found: dict[str, Any] = _with_lists(root)
    return found


def _with_lists(value: Any) -> Any:
    """Replace dicts whose keys are the numbers from 0 by lists."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(inner) for key, inner in value.items()}
    if found and set(found) == set(range(len(found))):
        return [found[i] for i in range(len(found))]
    return found


def _numbered(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace the names of parameters in an optimizer's state by their numbers in the parameter groups.

    Args:
        where: The state's name for errors.

    Raises:
        PiperError: The state does not have parameter groups, or has a parameter that is in none of them.
    """
    groups, states = state.get("param_groups"), state.get("state", {})
    if groups is None:
        raise PiperError(
            f"{where} does not have 'param_groups', so the parameter groups are not known. Give a folder that "
            "FSDPStrategy or ModelParallelStrategy has saved [PIPER-K002]"
        )
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise PiperError(
            f"{where} has a parameter group without 'params'. Use another checkpoint [PIPER-K002]"
        )
    names = [name for group in groups for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    if lost := sorted(states.keys() - number.keys()):
        raise PiperError(
            f"{where} has the parameter {lost[0]!r}, but no parameter group has it. Use another checkpoint "
            "[PIPER-K002]"
        )
    return {
        "state": {number[name]: of_param for name, of_param in states.items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }
