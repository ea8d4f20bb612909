"""Folders and files in a remote store, through fsspec.

A remote store has no rename and no atomic directory. An object appears when its upload is complete, at least
in object stores. Piper does not rely on it: it compares sizes and checksums of everything that it loads.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from fsspec import AbstractFileSystem

from lightning_piper.checkpoint.files import MANIFEST, saves_in
from lightning_piper.checkpoint.folders import Folder, SummedFile
from lightning_piper.errors import PiperError

AT_ONCE = 8  # ranges that are requested together
BUFFER = 1 << 24  # bytes of a request when a file is read from beginning to end
TABLE = 1 << 16  # bytes of a request for the table at the end of a file


class RemoteFolder(Folder):
    """A folder in a remote store.

    Args:
        fs: The file system.
        path: The path in the file system.
        address: The address with its protocol, which messages show.
    """

    is_remote = True

    def __init__(self, fs: AbstractFileSystem, path: str, address: str) -> None:
        self.fs, self.path, self._address = fs, path, address

    def __str__(self) -> str:
        return self._address

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.fs, f"{self.path}/{name}", f"{self._address}/{name}")

    def is_folder(self) -> bool:
        return bool(self.names())

    def names(self) -> list[str]:
        return [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in self._entries()]

    def size(self, name: str) -> int | None:
        found = entry_of(self.fs, f"{self.path}/{name}")
        return None if found is None or found["type"] != "file" else int(found["size"])

    def sizes(self) -> dict[str, int]:
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"])
            for entry in self._entries()
            if entry["type"] == "file"
        }

    def _entries(self) -> list[dict[str, Any]]:
        self.fs.invalidate_cache()
        try:
            entries: list[dict[str, Any]] = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        own = self.path.rstrip("/")  # some stores list an object of this name, or a marker of the folder
        return [entry for entry in entries if str(entry["name"]).rstrip("/") != own]

    def open(self, name: str) -> BinaryIO:
        return open_object(self.fs, f"{self.path}/{name}")

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        for first in range(0, len(wanted), AT_ONCE):
            names, starts, stops = zip(*wanted[first : first + AT_ONCE], strict=True)
            paths = [f"{self.path}/{name}" for name in names]
            for found in self.fs.cat_ranges(paths, list(starts), list(stops), on_error="raise"):
                if isinstance(found, Exception):
                    raise found
                yield found

    @contextmanager
    def create(self, name: str) -> Iterator[SummedFile]:
        self.fs.makedirs(self.path, exist_ok=True)
        file = self.fs.open(f"{self.path}/{name}", "wb")
        try:
            yield SummedFile(file)
        except BaseException:
            _abandon(file)
            raise
        file.close()

    def complete(self) -> None:
        pass  # a store keeps an object as soon as the upload is complete


def _abandon(file: Any) -> None:
    """Give up an upload. Do not let the file's destructor complete it."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True


def entry_of(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """Return the store's current entry for an object or a folder; None if it does not exist."""
    fs.invalidate_cache()
    try:
        return cast(dict[str, Any], fs.info(path))
    except FileNotFoundError:
        return None


class _Object(io.RawIOBase):
    """An object that is read by requests for ranges of bytes."""

    def __init__(self, fs: AbstractFileSystem, path: str, size: int) -> None:
        super().__init__()
        self._fs, self._path, self._size, self._position = fs, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._position + len(buffer))
        if stop <= self._position:
            return 0
        found = self._fs.cat_file(self._path, start=self._position, end=stop)
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def open_object(fs: AbstractFileSystem, path: str, buffer: int = BUFFER) -> BinaryIO:
    """Open an object for reading, with requests for `buffer` bytes. Raise a FileNotFoundError if it does not
    exist."""
    found = entry_of(fs, path)
    if found is None or found["type"] != "file":
        raise FileNotFoundError(path)
    return cast(BinaryIO, io.BufferedReader(_Object(fs, path, int(found["size"])), buffer))


def is_whole_file(fs: AbstractFileSystem, path: str) -> bool:
    """Return whether an object of this path exists and was not cut off.

    `torch.save` writes the table of an archive last. In a file that was cut off, the table is missing. Files in
    torch's older format have no table, and pass if they are not empty.
    """
    found = entry_of(fs, path)
    if found is None or found["type"] != "file":
        return False
    with open_object(fs, path, TABLE) as file:
        start = file.read(2)
        return zipfile.is_zipfile(file) if start == b"PK" else bool(start)


def copy_object(fs: AbstractFileSystem, source: str, target: str) -> None:
    """Copy an object inside of the store if the store can; otherwise through this process."""
    try:
        fs.cp_file(source, target)
    except NotImplementedError:
        with fs.open(source, "rb") as reading, fs.open(target, "wb") as writing:
            shutil.copyfileobj(reading, writing, BUFFER)
    found = [entry_of(fs, path) for path in (source, target)]
    sizes = [None if entry is None else entry["size"] for entry in found]
    if sizes[0] is None or sizes[0] != sizes[1]:
        one, other = ("no" if size is None else size for size in sizes)
        raise PiperError(
            f"the store copied {source} incompletely: it has {one} bytes, and its copy {target} has {other} bytes. "
            "Check the store, and save again [PIPER-K004]"
        )


def copy_save(source: RemoteFolder, target: RemoteFolder) -> None:
    """Copy the folder of a complete save, its manifest last."""
    source.fs.makedirs(target.path, exist_ok=True)
    for name in sorted(source.sizes(), key=lambda name: name == MANIFEST):
        copy_object(source.fs, f"{source.path}/{name}", f"{target.path}/{name}")


def erase(folder: RemoteFolder) -> None:
    """Delete everything of this name: first the manifests, so that a partly deleted checkpoint is not a
    checkpoint."""
    fs = folder.fs
    if entry_of(fs, folder.path) is None:
        return
    for each in [folder, *map(folder.child, saves_in(folder))]:
        if each.size(MANIFEST) is not None:
            fs.rm_file(f"{each.path}/{MANIFEST}")
    for _ in range(2):  # a store may have an object and a folder of this name
        if entry_of(fs, folder.path) is not None:
            fs.rm(folder.path, recursive=True)
