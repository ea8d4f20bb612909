"""Checkpoint files: complete or absent, with a checksum of everything that was written.

A checkpoint is written under a temporary name in the same directory, and renamed when it is complete. A
directory cannot be renamed onto a directory that has content. So an earlier checkpoint of the same name is
first renamed to a second known name. Loading finds the earlier checkpoint there if the process ends before
the new checkpoint has its name.

The files of a directory are listed in its manifest with their sizes and checksums. The manifest is written
last.
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

from lightning_piper.common.regular_files import open_regular
from lightning_piper.errors import CheckpointNotFoundError, PiperError

MANIFEST = "manifest.json"
# The files that a manifest may list, all directly in the directory.
FILES = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata|meta\.pt")
KIND = "lightning_piper sharded checkpoint"
VERSION = 1
BLOCK = 1 << 20  # bytes read at once for a checksum


# Names


def temporary_of(path: Path) -> Path:
    """Return the name under which a checkpoint is written, and to which it is renamed before it is deleted.
    For example, `.last.ckpt.tmp` for `last.ckpt`, in the same directory.

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


def located(path: Path) -> Path:
    """Return the path of the checkpoint of this name: `path`, or after an interrupted save
    `earlier_of(path)`.

    Raises:
        CheckpointNotFoundError: Neither path exists.
    """
    for place in (path, earlier_of(path)):
        if os.path.lexists(place):
            return place
    raise CheckpointNotFoundError(
        f"there is no checkpoint {path}. Give the file or directory that a fit has saved [PIPER-K001]"
    )


def prepare(path: Path) -> Path:
    """Clean up after interrupted saves of this checkpoint, and return the temporary name, which is then free.

    If only the earlier checkpoint exists, it gets its name back.
    """
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
    that name, if there is one. At every moment, `located` finds the earlier or the new checkpoint."""
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


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to permanent storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Manifest

Fingerprint = list[int]  # size in bytes, CRC-32


def fingerprint(path: Path) -> Fingerprint:
    """Return size in bytes and CRC-32 of a file's present content.

    Raises:
        OSError: The file cannot be read.
        PiperError: The path is not a regular file, for example a link.
    """
    size = crc = 0
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def write_manifest(folder: Path, content: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> None:
    """Write the manifest, which declares a directory complete.

    Args:
        folder: The directory of all files of the checkpoint.
        content: Further entries of the manifest, in JSON.
        files: Name -> fingerprint.

    Raises:
        PiperError: A file is missing, or has another size.
    """
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise PiperError(
                f"this process does not see {path} as another process wrote it. A sharded checkpoint needs a "
                "directory that all processes share, on one machine or in a network file system [PIPER-K004]"
            )
    body = {"kind": KIND, "version": VERSION, **content, "files": dict(files)}
    with (folder / MANIFEST).open("w") as file:
        json.dump({"crc32": _crc(body), "manifest": body}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the entries that `write_manifest` wrote.

    Raises:
        PiperError: `folder` is a file or has no manifest. Or the manifest is damaged, has another version of
            the format, or has an entry that no checkpoint can have.
    """
    if not folder.is_dir():
        raise PiperError(
            f"{folder} is a file, not the directory of a sharded checkpoint. Give a directory that a fit "
            "with PiperStrategy(checkpoint='sharded') has saved [PIPER-K001]"
        )
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            found = json.loads(file.read())
        body: dict[str, Any] = found["manifest"]
        intact = found["crc32"] == _crc(body) and body["kind"] == KIND
    except FileNotFoundError:
        raise PiperError(
            f"{folder} has no {MANIFEST}: it is an incomplete save, or not a sharded checkpoint of "
            "lightning_piper. Use another checkpoint [PIPER-K002]"
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


def _strange(body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first invalid entry of a manifest; None if all entries are valid.

    A manifest with a correct checksum may still be invalid, because anyone may have written it.
    """
    files, tensors = body.get("files"), body.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not isinstance(body.get("id"), str):
        return "has no table of files, of tensors, or no id"
    for name, value in files.items():
        if not FILES.fullmatch(name):
            return f"names the file {name!r}"
        if not _are_counts(value) or len(value) != 2:
            return f"gives {value!r} as size and checksum of {name}"
    room = sum(size for size, _ in files.values())
    for key, spec in tensors.items():
        if not _is_spec(spec, room):
            return f"says that {key!r} is {spec!r}"
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


def verify(folder: Path, files: Mapping[str, Fingerprint], names: Iterable[str]) -> None:
    """Check that these files have the content that was written.

    Raises:
        PiperError: A file is missing or differs.
    """
    for name in names:
        path, (size, crc) = folder / name, files[name]
        try:
            found, found_crc = fingerprint(path)
        except FileNotFoundError:
            raise PiperError(
                f"{path} is missing, and the checkpoint cannot be loaded without it. Use another checkpoint"
                " [PIPER-K002]"
            ) from None
        if found != size:
            raise PiperError(
                f"{path} has {found} bytes, {size} were saved: the checkpoint is damaged. Use another "
                "checkpoint [PIPER-K002]"
            )
        if found_crc != crc:
            raise PiperError(
                f"{path} does not have the content that was saved (CRC-32 {found_crc:08x}, not {crc:08x}): "
                "it is damaged, or belongs to another checkpoint. Use another checkpoint [PIPER-K002]"
            )


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
