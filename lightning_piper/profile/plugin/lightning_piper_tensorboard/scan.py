"""Find the recordings in the log directories, and read their files.

Anyone who may write to a log directory may put links, FIFOs and files of any size there at any moment. So a
run is a path of names below its log directory, and the code opens one name at a time. The code never follows
a link, not even a link that was created after the code listed the folder.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = "piper"
LIMIT = 64 << 20  # maximum bytes of a file: about a million boxes
_FILE = re.compile(r"plan(_[0-9]+)?\.json|step_[0-9]+\.json")


class Refused(Exception):
    """A file of a recording cannot be served. The message says why."""


@dataclass(frozen=True)
class RecordedRun:
    """A run below a log directory that has recordings.

    Attributes:
        root: The log directory.
        parts: The names of the folders from `root` to the run's files.
        files: The names of the files.
    """

    root: Path
    parts: tuple[str, ...]
    files: frozenset[str]


def scan(roots: Mapping[str, Path]) -> dict[str, RecordedRun]:
    """Return name -> run, sorted by name. A run is a folder with step files in its folder `piper`. Its name
    is a prefix and its path in the log directory, or "." for the log directory itself without a prefix.

    Args:
        roots: Prefix of the runs' names -> log directory.
    """
    runs: dict[str, RecordedRun] = {}
    for prefix, root in roots.items():
        for folder, names, _ in os.walk(root):
            if FOLDER not in names:
                continue
            names.remove(FOLDER)
            relative = Path(folder).relative_to(root)
            parts = (*relative.parts, FOLDER)
            files = _files(root, parts)
            if any(name.startswith("step_") for name in files):
                runs[
                    "/".join(part for part in (prefix, relative.as_posix()) if part not in ("", ".")) or "."
                ] = RecordedRun(root, parts, files)
    return dict(sorted(runs.items()))


def _files(root: Path, parts: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the recording's files in a folder; empty if the folder cannot be read."""
    try:
        handle = _folder(root, parts)
        try:
            with os.scandir(handle) as entries:
                return frozenset(
                    x.name for x in entries if _FILE.fullmatch(x.name) and x.is_file(follow_symlinks=False)
                )
        finally:
            os.close(handle)
    except OSError:  # deleted in the meantime, or a link
        return frozenset()


def _folder(root: Path, parts: tuple[str, ...]) -> int:
    """Open a folder below the log directory, and return its file descriptor, which the caller closes. Only
    the log directory itself may be a link.

    Raises:
        OSError: A folder does not exist or is a link.
    """
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
        finally:
            os.close(handle)
        handle = inner
    return handle


def read(run: RecordedRun, name: str) -> bytes:
    """Return the content of a run's file.

    Raises:
        Refused: The file was deleted, cannot be opened, is not a regular file, or is larger than `LIMIT`.
    """
    try:
        folder = _folder(run.root, run.parts)
        try:
            # A FIFO would block.
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Refused("has been deleted") from None
        raise Refused(
            "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        ) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("is not a regular file")
        if found.st_size > LIMIT:
            raise Refused(f"has {found.st_size} bytes, more than the {LIMIT} that the tab reads")
        with open(handle, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(handle)


def roots_of(logdir: str | None, spec: str | None) -> dict[str, Path]:
    """Return prefix -> log directory, from TensorBoard's `--logdir` or, without it, from `--logdir_spec`
    (`name:path,name:path`). A path without a name has the prefix "".
    """
    if logdir:
        return {"": Path(logdir).expanduser()}
    roots: dict[str, Path] = {}
    for part in (spec or "").split(","):
        name, colon, path = part.partition(":")
        if colon and "/" not in name:
            roots[name] = Path(path).expanduser()
        elif part:
            roots[""] = Path(part).expanduser()
    return roots


def number_of(name: str) -> int:
    """Return the number of a step file."""
    return int(name.removeprefix("step_").removesuffix(".json"))
