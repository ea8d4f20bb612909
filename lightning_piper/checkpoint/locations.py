"""The location of a checkpoint: a path on a disk, or an address in a remote store. Both have one interface.

A save first writes everything, and one step at its end lets the new checkpoint take the place of an earlier
one of the same name. On a disk, this step is a rename. In a store, it is the upload of the manifest of a sharded
checkpoint, or of the object of a checkpoint that is one file. `Location.found` finds the earlier checkpoint
until then.
"""

from __future__ import annotations

import os
import platform
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fsspec import available_protocols
from fsspec.core import url_to_fs

from lightning_piper.checkpoint.files import (
    MANIFEST,
    check_replaceable,
    earlier_of,
    existing_path,
    is_complete,
    newest_complete,
    newest_save,
    no_checkpoint,
    number_of,
    prepare,
    publish,
    remove,
    saves_in,
    temporary_of,
)
from lightning_piper.checkpoint.folders import Folder, LocalFolder, sync
from lightning_piper.checkpoint.remote import (
    RemoteFolder,
    copy_object,
    copy_save,
    entry_of,
    erase,
    is_whole_file,
    open_object,
)
from lightning_piper.errors import PiperError

LOCAL = ("file", "local")  # protocols of addresses that are local paths


class Location(ABC):
    """The location of a checkpoint.

    A sharded checkpoint is saved by `begin`, files in the folder, the manifest, and `publish`. A checkpoint
    that is one file is saved by `begin_file`, the file, and `publish_file`.
    """

    @abstractmethod
    def __str__(self) -> str:
        """Return the absolute path or the address."""

    @abstractmethod
    def root(self) -> Folder:
        """Return the folder of this path or address, whether it is a checkpoint or not."""

    @abstractmethod
    def found(self) -> tuple[str, bool]:
        """Return where the checkpoint is, which may be an earlier checkpoint after an interrupted save, and
        whether it is sharded.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
        """

    @abstractmethod
    def saved_at(self) -> float | None:
        """Return the time, in seconds, at which the checkpoint here was complete; None if there is no complete
        checkpoint."""

    @abstractmethod
    def folder(self) -> Folder:
        """Return the folder of the sharded checkpoint. If it is not complete, reading its manifest raises an
        error.

        Raises:
            PiperError: There is no checkpoint, or it is one file.
        """

    @abstractmethod
    def begin(self) -> Folder:
        """Clean up after interrupted saves, and return a new folder for a sharded checkpoint."""

    @abstractmethod
    def opened(self, address: str) -> Folder:
        """Return the folder that `begin` of another process returned, by its address."""

    @abstractmethod
    def publish(self, folder: Folder) -> None:
        """Let the folder, which has its manifest, be the checkpoint, and delete the earlier one."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the folder of a save that failed, if it exists."""

    @abstractmethod
    def begin_file(self) -> str | Path:
        """Clean up after interrupted saves, and return where to write a checkpoint that is one file."""

    @abstractmethod
    def exists(self, target: str | Path) -> bool:
        """Return whether the file of `begin_file` exists."""

    @abstractmethod
    def publish_file(self, target: str | Path) -> None:
        """Let the written file be the checkpoint, and delete the earlier one."""

    @abstractmethod
    def discard_file(self, target: str | Path) -> None:
        """Delete the remaining files of a save that has ended or failed."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the checkpoint, and the files of interrupted saves of it."""

    @abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """Return values that are equal for processes that see the same file at this location."""

    @abstractmethod
    def open_file(self) -> BinaryIO:
        """Open the checkpoint that is one file for reading."""


class LocalLocation(Location):
    """A path on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def root(self) -> Folder:
        return LocalFolder(self._path)

    def found(self) -> tuple[str, bool]:
        place = existing_path(self._path)
        return str(place), place.is_dir()

    def saved_at(self) -> float | None:
        folder = newest_complete(LocalFolder(self._path)) if self._path.is_dir() else None
        if folder is not None:
            return Path(folder.path_of(MANIFEST)).stat().st_mtime
        return self._path.stat().st_mtime if self._path.is_file() else None

    def folder(self) -> Folder:
        place = existing_path(self._path)
        if not place.is_dir():
            raise _is_a_file(place)
        return newest_save(LocalFolder(place))

    def begin(self) -> Folder:
        temporary = prepare(self._path)
        temporary.mkdir()
        return LocalFolder(temporary)

    def opened(self, address: str) -> Folder:
        return LocalFolder(Path(address))

    def publish(self, folder: Folder) -> None:
        publish(Path(str(folder)), self._path)

    def discard(self) -> None:
        if temporary_of(self._path).is_dir():
            prepare(self._path)

    def begin_file(self) -> Path:
        return prepare(self._path)

    def exists(self, target: str | Path) -> bool:
        return Path(target).exists()

    def publish_file(self, target: str | Path) -> None:
        sync(Path(target))
        publish(Path(target), self._path)

    def discard_file(self, target: str | Path) -> None:
        Path(target).unlink(missing_ok=True)

    def remove(self) -> None:
        remove(self._path)

    def identity(self) -> tuple[Any, ...]:
        found = self._path.stat()
        return platform.node(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def open_file(self) -> BinaryIO:
        return self._path.open("rb")


class RemoteLocation(Location):
    """An address in a remote store.

    A sharded checkpoint has a folder for each save, with a number that grows, and the newest folder with an
    intact manifest counts. So no save changes files of an earlier save. A checkpoint that is one file is an
    object of the given name. An earlier object is first copied to the name of `earlier_of`.
    """

    def __init__(self, address: str) -> None:
        address = address.rstrip("/")
        fs, path = url_to_fs(address)
        self._fs, self._root = fs, RemoteFolder(fs, path.rstrip("/"), address)
        earlier = PurePosixPath(self._root.path)
        earlier = earlier.with_name(earlier_of(Path(earlier.name)).name)
        self._earlier = RemoteFolder(fs, str(earlier), f"{address.rpartition('/')[0]}/{earlier.name}")

    def __str__(self) -> str:
        return str(self._root)

    def root(self) -> Folder:
        return self._root

    def found(self) -> tuple[str, bool]:
        for root in (self._root, self._earlier):
            if newest_complete(root) is not None:
                return str(root), True
            if is_whole_file(self._fs, root.path):
                return str(root), False
        entry = entry_of(self._fs, self._root.path)
        if entry is None:
            raise no_checkpoint(str(self))
        return str(self), entry["type"] != "file"

    def saved_at(self) -> float | None:
        folder = newest_complete(self._root)
        if folder is not None:
            assert isinstance(folder, RemoteFolder)
            return float(self._fs.modified(f"{folder.path}/{MANIFEST}").timestamp())
        if is_whole_file(self._fs, self._root.path):
            return float(self._fs.modified(self._root.path).timestamp())
        return None

    def folder(self) -> Folder:
        place, sharded = self.found()
        if not sharded:
            raise _is_a_file(place)
        return newest_save(self._earlier if place == str(self._earlier) else self._root)

    def begin(self) -> Folder:
        root = self._root
        if self._is_object(root.path):
            self._copy_to_earlier()
            self._fs.rm_file(root.path)
        kept = newest_complete(root)
        number = max(map(number_of, saves_in(root)), default=0) + 1
        self._erase_others(kept)
        return root.child(f"save-{number:06d}-{uuid.uuid4().hex[:8]}")

    def opened(self, address: str) -> Folder:
        return self._root.child(address.rpartition("/")[2])

    def publish(self, folder: Folder) -> None:
        if not is_complete(folder):
            raise PiperError(
                f"the store does not have the manifest of {folder} as it was written. Check the store, and save "
                "again [PIPER-K004]"
            )
        self._erase_others(folder)
        erase(self._earlier)

    def _erase_others(self, kept: Folder | None) -> None:
        """Delete the folders of all saves but one, and a sharded checkpoint that was copied here as a
        whole."""
        root = self._root
        for name in saves_in(root):
            if kept is None or str(root.child(name)) != str(kept):
                erase(root.child(name))
        if kept is not None and str(kept) != str(root):
            for name in sorted(root.sizes(), key=lambda name: name != MANIFEST):
                self._fs.rm_file(f"{root.path}/{name}")

    def discard(self) -> None:
        self._erase_others(newest_complete(self._root))

    def begin_file(self) -> str:
        root = self._root
        check_replaceable(root)
        kept = newest_complete(root)
        if kept is not None:
            assert isinstance(kept, RemoteFolder)
            erase(self._earlier)
            copy_save(kept, self._earlier)
        elif self._is_object(root.path):
            self._copy_to_earlier()
        # Lightning ignores a PermissionError of a store. So the object must not exist before it is written.
        erase(root)
        return str(root)

    def exists(self, target: str | Path) -> bool:
        return self._is_object(self._root.path)

    def publish_file(self, target: str | Path) -> None:
        if not is_whole_file(self._fs, self._root.path):
            raise PiperError(
                f"the store did not keep the whole content of {self}. Check the store, and save again "
                "[PIPER-K004]"
            )
        erase(self._earlier)

    def discard_file(self, target: str | Path) -> None:
        with suppress(Exception):  # the next save cleans up
            if is_whole_file(self._fs, self._root.path):
                erase(self._earlier)

    def remove(self) -> None:
        erase(self._earlier)
        erase(self._root)

    def identity(self) -> tuple[Any, ...]:
        entry = entry_of(self._fs, self._root.path)
        if entry is None:
            raise FileNotFoundError(str(self))
        return str(self), entry["size"], str(entry.get("ETag", ""))

    def open_file(self) -> BinaryIO:
        return open_object(self._fs, self._root.path)

    def _is_object(self, path: str) -> bool:
        entry = entry_of(self._fs, path)
        return entry is not None and entry["type"] == "file"

    def _copy_to_earlier(self) -> None:
        """Copy the object to the name of the earlier checkpoint. Do nothing if the object is not complete,
        because an interrupted save has already made the copy."""
        if is_whole_file(self._fs, self._root.path):
            erase(self._earlier)
            copy_object(self._fs, self._root.path, self._earlier.path)


def _is_a_file(place: str | Path) -> PiperError:
    return PiperError(
        f"{place} is a file, not the directory of a sharded checkpoint. Give a directory that a fit with "
        "PiperStrategy(checkpoint='sharded') has saved [PIPER-K001]"
    )


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the address of a remote store.

    Raises:
        PiperError: The path is an address that `pathlib.Path` has changed into the name of a folder.
    """
    text = os.fspath(path)
    protocol, separator, rest = text.partition(":/")
    if separator and not rest.startswith("/") and protocol in available_protocols():
        raise PiperError(
            f"{text} is not an address: pathlib.Path makes one slash of two. Give the address as a text: "
            f"{f'{protocol}://{rest}'!r} [PIPER-R003]"
        )
    return rest.startswith("/") and protocol not in LOCAL


def is_writable(path: str | os.PathLike[str]) -> bool:
    """Return whether Piper can write checkpoints to a path: to every path that is not the address of a web
    server."""
    return not os.fspath(path).startswith(("http://", "https://"))


def location_of(path: str | os.PathLike[str]) -> Location:
    """Return the location of a checkpoint, by a local path, a `file://` address, or a remote address."""
    text = os.fspath(path)
    if is_remote(text):
        return RemoteLocation(text)
    protocol, separator, rest = text.partition("://")
    return LocalLocation(Path(os.path.abspath(rest if separator and protocol in LOCAL else text)))


def checkpoints_in(folder: str | os.PathLike[str], name: str) -> list[str]:
    """Return the paths or addresses of everything in a folder whose name begins with `name` and ends with
    `.ckpt`."""
    location = location_of(folder)
    found = location.root().names()
    return [
        f"{location}/{each}" for each in sorted(found) if each.startswith(name) and each.endswith(".ckpt")
    ]
