"""Checkpoint files: complete or absent, with a checksum of everything that was written.

A checkpoint is written under a temporary name in the same directory, and renamed when it is complete. A
directory cannot be renamed onto a directory that has content. So an earlier checkpoint of the same name is
first renamed to a second known name. Loading finds the earlier checkpoint there if the process ends before
the new checkpoint has its name.

The files of a folder are listed in its manifest with their sizes and checksums. The manifest is written last.
A local checkpoint is such a folder. A remote store cannot rename. So a remote checkpoint has a folder inside
for each save, and the newest folder with a manifest counts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_piper.checkpoint.folders import Fingerprint, Folder, LocalFolder, fingerprint, read, sync
from lightning_piper.checkpoint.foreign_folders import conversion_of
from lightning_piper.errors import CheckpointNotFoundError, PiperError

MANIFEST = "manifest.json"
# The files that a manifest may list, all directly in the directory.
FILES = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata|meta\.pt")
KIND = "lightning_piper sharded checkpoint"
VERSION = 1
# The folder of one save in a remote checkpoint: a number that grows, and random digits.
SAVE = re.compile(r"save-[0-9]{6,}-[0-9a-f]{8}")


# Names


def temporary_of(path: Path) -> Path:
    """Return the name of a checkpoint while it is written or deleted. For example, `.last.ckpt.tmp` for
    `last.ckpt`, in the same directory.

    A checkpoint of this name is never loaded, and may be deleted. The name avoids `hpc_ckpt_`, because
    Lightning resumes from any file with `hpc_ckpt_` in its name.
    """
    return path.with_name(f".{path.name.replace('ckpt_', 'ckpt-')}.tmp")


def earlier_of(path: Path) -> Path:
    """Return the name that an earlier checkpoint has while a new checkpoint takes its name, for example
    `last.earlier.ckpt` for `last.ckpt`. A checkpoint of this name is always complete.

    `fit(ckpt_path="last")` finds it, because the name begins and ends like the name of the last checkpoint.
    """
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def existing_path(path: Path) -> Path:
    """Return the path of the checkpoint of this name: `path`, or after an interrupted save
    `earlier_of(path)`.

    Raises:
        CheckpointNotFoundError: Neither path exists.
    """
    for place in (path, earlier_of(path)):
        if os.path.lexists(place):
            return place
    raise no_checkpoint(path)


def no_checkpoint(path: str | Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no checkpoint {path}. Give the file or directory that a fit has saved [PIPER-K001]"
    )


def check_replaceable(folder: Folder) -> None:
    """Check that a save may replace this folder: it does not exist, is empty, or has files of a checkpoint.

    Raises:
        PiperError: It has other content, which a save would delete.
    """
    names = folder.names()
    if names and not any(name == MANIFEST or FILES.fullmatch(name) or SAVE.fullmatch(name) for name in names):
        raise PiperError(
            f"{folder} is a folder that is not a checkpoint: it has {min(names)!r}. A save under this name would "
            "delete the folder. Give the name of a file, such as "
            f"{folder.path_of('last.ckpt')!r} [PIPER-K005]"
        )


def prepare(path: Path) -> Path:
    """Clean up after interrupted saves of this checkpoint, and return the temporary name, which is then free.

    If only the earlier checkpoint exists, it gets its name back.

    Raises:
        PiperError: The path is a directory with content that is not a checkpoint.
    """
    check_replaceable(LocalFolder(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier, temporary = earlier_of(path), temporary_of(path)
    _delete(temporary)
    if os.path.lexists(path):
        _retire(earlier, temporary)
    elif os.path.lexists(earlier):
        os.rename(earlier, path)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete checkpoint from its temporary name to `path`, and delete the earlier checkpoint of
    that name, if there is one. At every moment, `existing_path` finds the earlier or the new checkpoint."""
    if os.path.lexists(path) and (path.is_dir() or temporary.is_dir()):
        os.rename(path, earlier_of(path))
    os.replace(temporary, path)
    sync(path.parent)
    _retire(earlier_of(path), temporary)


def remove(path: Path) -> None:
    """Remove a checkpoint, and the files that interrupted saves of this checkpoint left."""
    temporary = temporary_of(path)
    _delete(temporary)
    _retire(earlier_of(path), temporary)
    _retire(path, temporary)


def _retire(path: Path, temporary: Path) -> None:
    """Delete a path if it exists.

    The path is first renamed to `temporary`, because a partly deleted checkpoint must not look like a
    checkpoint.
    """
    if os.path.lexists(path):
        os.rename(path, temporary)
    _delete(temporary)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Manifest


def write_manifest(folder: Folder, content: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> None:
    """Write the manifest, which declares a folder complete.

    Args:
        folder: The folder of all files of the save.
        content: Further entries of the manifest, in JSON.
        files: Name -> fingerprint.

    Raises:
        PiperError: A file is missing, or has the wrong size.
    """
    found = folder.sizes()
    for name, (size, _) in files.items():
        if found.get(name) == size:
            continue
        if folder.is_remote:
            raise PiperError(
                f"the store has {found.get(name, 'no')} bytes of {folder.path_of(name)}, but a process wrote "
                f"{size}. Check the store, and save again [PIPER-K004]"
            )
        raise PiperError(
            f"rank 0 does not see {folder.path_of(name)} as it was written. Save into a directory that "
            "all processes share, on one machine or in a network file system [PIPER-K004]"
        )
    body = {"kind": KIND, "version": VERSION, **content, "files": dict(files)}
    with folder.create(MANIFEST) as file:
        file.write(json.dumps({"crc32": _crc(body), "manifest": body}).encode())
    folder.complete()


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Return the entries that `write_manifest` wrote.

    Raises:
        PiperError: `folder` is a file or has no manifest. Or the manifest is damaged, has another version of
            the format, or has an entry that no checkpoint can have.
    """
    path = folder.path_of(MANIFEST)
    try:
        found = json.loads(read(folder, MANIFEST))
        body: dict[str, Any] = found["manifest"]
        intact = found["crc32"] == _crc(body) and body["kind"] == KIND
    except FileNotFoundError:
        conversion = conversion_of(folder)
        if conversion is not None:
            raise PiperError(f"{conversion} [PIPER-K002]") from None
        raise PiperError(
            f"{folder} has no {MANIFEST}, so it is not a complete sharded checkpoint of lightning_piper. Use another "
            "checkpoint [PIPER-K002]"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise PiperError(
            f"{path} is damaged, or does not belong to a sharded checkpoint of lightning_piper. Use another "
            "checkpoint [PIPER-K002]"
        )
    if body.get("version") != VERSION:
        raise PiperError(
            f"{path} has version {body.get('version')} of the format, but this lightning_piper reads "
            f"version {VERSION}. Load it with the release of lightning_piper that saved it [PIPER-K002]"
        )
    if strange := _strange(body):
        raise PiperError(
            f"{path} {strange}, which lightning_piper never writes, so the checkpoint is not loaded. Use "
            "another checkpoint [PIPER-K002]"
        )
    return body


def saves_in(folder: Folder) -> list[str]:
    """Return the names of the folders of single saves in this folder, the newest first."""
    return sorted(filter(SAVE.fullmatch, folder.names()), key=number_of, reverse=True)


def number_of(save: str) -> int:
    return int(save.split("-")[1])


def newest_complete(folder: Folder) -> Folder | None:
    """Return the folder of the newest complete save: the newest one inside of this folder, or the folder
    itself. None if there is none."""
    for found in [*map(folder.child, saves_in(folder)), folder]:
        if is_complete(found):
            return found
    return None


def is_complete(folder: Folder) -> bool:
    """Return whether the folder has an intact manifest."""
    try:
        read_manifest(folder)
    except PiperError:
        return False
    return True


def newest_save(folder: Folder) -> Folder:
    """Return the folder of the newest complete save. If there is none, return a folder for which
    `read_manifest` raises the error."""
    found = newest_complete(folder)
    if found is not None:
        return found
    saves = [] if folder.size(MANIFEST) is not None else saves_in(folder)
    return folder.child(saves[0]) if saves else folder


def _strange(body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first invalid entry of a manifest; None if all entries are valid.

    A manifest with a correct checksum may still be invalid, because anyone may have written it.
    """
    files, tensors = body.get("files"), body.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not isinstance(body.get("id"), str):
        return "lacks its table of files, its table of tensors, or its id"
    for name, value in files.items():
        if not FILES.fullmatch(name):
            return f"names the file {name!r}"
        if not _are_counts(value) or len(value) != 2:
            return f"gives {value!r} as size and checksum of {name}"
    room = sum(size for size, _ in files.values())
    for key, spec in tensors.items():
        if not _is_spec(spec, room):
            return f"says that {key!r} is {spec!r}"
    chunks = body.get("chunks", {})
    if not isinstance(chunks, dict) or not all(isinstance(rows, list) for rows in chunks.values()):
        return "has no table of chunks"
    for name, rows in chunks.items():
        if name not in files or not all(_are_counts(row) and len(row) == 3 for row in rows):
            return f"gives a wrong table of the chunks of {name!r}"
    return None


def _is_spec(spec: Any, room: int) -> bool:
    """Return whether this is the spec of a tensor (`TensorRange.spec`) that fits into `room` bytes."""
    if not isinstance(spec, dict) or not (_are_counts(spec.get("shape")) and _are_counts(spec.get("layout"))):
        return False
    dtype = getattr(torch, str(spec.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or sorted(spec["layout"]) != list(range(len(spec["shape"]))):
        return False
    return math.prod(spec["shape"]) * dtype.itemsize <= room


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def verify(folder: Folder, files: Mapping[str, Fingerprint], names: Iterable[str]) -> None:
    """Check that these files have the content that was written.

    Raises:
        PiperError: A file is missing or differs.
    """
    for name in names:
        path, (size, crc) = folder.path_of(name), files[name]
        try:
            with folder.open(name) as file:
                found, found_crc = fingerprint(file)
        except FileNotFoundError:
            raise _missing(path) from None
        if found != size:
            raise _other_size(path, found, size)
        if found_crc != crc:
            raise other_content(path, found_crc, crc)


def verify_sizes(folder: Folder, files: Mapping[str, Fingerprint], names: Iterable[str]) -> None:
    """Check that these files have the sizes that were written, without reading them.

    Raises:
        PiperError: A file is missing or has the wrong size.
    """
    for name in names:
        found, (size, _) = folder.size(name), files[name]
        if found is None:
            raise _missing(folder.path_of(name))
        if found != size:
            raise _other_size(folder.path_of(name), found, size)


def _missing(path: str) -> PiperError:
    return PiperError(
        f"{path} is missing, and the checkpoint cannot be loaded without it. Use another checkpoint"
        " [PIPER-K002]"
    )


def _other_size(path: str, found: int, size: int) -> PiperError:
    return PiperError(
        f"{path} has {found} bytes instead of {size}: the checkpoint is damaged. Use another checkpoint"
        " [PIPER-K002]"
    )


def other_content(path: str, found: int, crc: int, where: str = "") -> PiperError:
    """Return the error for a file, or the bytes `where` of it, with another CRC-32 than was saved."""
    return PiperError(
        f"{path} does not have the content that was saved{where} (CRC-32 {found:08x}, not {crc:08x}). Use another "
        "checkpoint [PIPER-K002]"
    )


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
