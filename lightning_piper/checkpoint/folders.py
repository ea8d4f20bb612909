"""One small interface to a folder with the files of one save, on a disk or in a remote store.

Savers and loaders of sharded checkpoints use only this interface. A remote store cannot rename, so the
interface does not have that operation: the manifest, which is written last, declares a folder complete.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lightning_piper.common.regular_files import open_regular
from lightning_piper.errors import PiperError

Fingerprint = list[int]  # size in bytes, CRC-32
BLOCK = 1 << 20  # bytes read at once for a checksum


class SummedFile:
    """A file that is being written, with checksums of its content so far.

    `torch.distributed.checkpoint` asks for the position before and after each tensor. So the positions that
    it asks for divide the file into tensors, and each of them gets its own checksum.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._size, self._crc = file, 0, 0
        self._start, self._part = 0, 0
        self.parts: list[list[int]] = []  # offset, size and CRC-32 of each part between two positions

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._size += len(view)
        self._crc, self._part = zlib.crc32(view, self._crc), zlib.crc32(view, self._part)
        return len(view)

    def tell(self) -> int:
        if self._size > self._start:
            self.parts.append([self._start, self._size - self._start, self._part])
            self._start, self._part = self._size, 0
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass  # `Folder.create` closes the file

    @property
    def fingerprint(self) -> Fingerprint:
        return [self._size, self._crc]


class Folder(ABC):
    """The folder of one save."""

    # Whether reading is expensive, so that a loader reads and checks only the parts of files that it needs.
    is_remote = False

    @abstractmethod
    def __str__(self) -> str:
        """Return the address. Messages show it, and `Location.opened` accepts it."""

    def path_of(self, name: str) -> str:
        """Return the address of a file. Messages show it."""
        return f"{self}/{name}"

    @abstractmethod
    def child(self, name: str) -> Folder:
        """Return a folder in this folder."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Return whether the folder exists."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the folders and files in this folder; none if it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return name -> size in bytes of all files directly in this folder."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raise a FileNotFoundError if it does not exist."""

    @abstractmethod
    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield the bytes `start:stop` of each `(name, start, stop)`; fewer bytes if a file ends earlier."""

    @abstractmethod
    @contextmanager
    def create(self, name: str) -> Iterator[SummedFile]:
        """Return a context with a new file. At its end, the file is in permanent storage."""
        yield SummedFile(None)

    @abstractmethod
    def complete(self) -> None:
        """Flush the names of the folder's files to permanent storage."""


class LocalFolder(Folder):
    """A directory. It opens only regular files for reading, no links."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def names(self) -> list[str]:
        return os.listdir(self.path) if self.path.is_dir() else []

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def sizes(self) -> dict[str, int]:
        return {name: size for name in self.names() if (size := self.size(name)) is not None}

    def open(self, name: str) -> BinaryIO:
        path = self.path / name
        if path.exists() and not path.is_file() and not path.is_symlink():
            raise PiperError(
                f"{path} is not a regular file, so Piper does not read it. Use another checkpoint [PIPER-K002]"
            )
        return open_regular(path)

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        for name, start, stop in wanted:
            with self.open(name) as file:
                file.seek(start)
                yield file.read(stop - start)

    @contextmanager
    def create(self, name: str) -> Iterator[SummedFile]:
        # A network file system may not show another process's directory yet.
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / name).open("wb") as file:
            yield SummedFile(file)
            file.flush()
            os.fsync(file.fileno())

    def complete(self) -> None:
        sync(self.path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to permanent storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(file: BinaryIO) -> Fingerprint:
    """Return size in bytes and CRC-32 of the content of an open file."""
    size = crc = 0
    while block := file.read(BLOCK):
        size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def read(folder: Folder, name: str) -> bytes:
    """Return the content of a file. Raise a FileNotFoundError if it does not exist."""
    with folder.open(name) as file:
        return file.read()
