"""Files that one run keeps for the next, in the user's cache folder.

A file is complete or absent. Piper reads a file only if no other user can have written it. A person who can
write where this user writes can also change the user's programs, so nothing is signed. Damaged files, and
files that others can write, count as absent. A folder that cannot be written to is not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where processes do not wait for each other
    fcntl = None  # type: ignore[assignment]

CACHE = "XDG_CACHE_HOME"  # names the folder that contains this package's folder (default: ~/.cache)
MANY = 256  # the largest number of files in a folder
LARGE = 1 << 26  # largest file in bytes; larger content is not kept
DAY = 86400.0  # seconds; the clocks of two machines differ by less
PATIENCE = 120 * 10**9  # nanoseconds to wait for another process that makes a file
_SUM = hashlib.sha256
# Without O_NONBLOCK, opening a pipe would block.
_LOCKING = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READING = (
    os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)


def folder(kind: str) -> Path:
    """Return the folder for files of this kind, which may not exist yet. For a user without a home, return a
    path that cannot exist."""
    home = os.path.expanduser("~")
    own = os.environ.get(CACHE) or (os.devnull if home == "~" else os.path.join(home, ".cache"))
    return Path(own) / "lightning_piper" / kind


def read(path: Path) -> bytes | None:
    """Return the content that `write` put there. None if it is damaged, or `read_plain` returns None."""
    found, size = read_plain(path) or b"", _SUM().digest_size
    return found[size:] if found[:size] == _sum(path, found[size:]) else None


def read_plain(path: Path) -> bytes | None:
    """Return the content that `write_plain` put there, or None if it cannot be trusted.

    The result is None if there is no regular file that can be read, if another user may have written the
    file, or if it is larger than `LARGE`.
    """
    try:
        with open(os.open(path, _READING), "rb") as file:
            status = os.fstat(file.fileno())
            if (
                not (stat.S_ISREG(status.st_mode) and _is_own(status) and _is_own(os.stat(path.parent)))
                or status.st_size > LARGE
            ):
                return None
            return file.read()
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Write or replace a file, with a checksum that shows damage. Do nothing if the content is larger than
    `LARGE`, or if the file cannot be written. Remove the oldest files of a full folder."""
    write_plain(path, _sum(path, content) + content)


def write_plain(path: Path, content: bytes) -> bool:
    """Like `write`, but without a checksum, so that other programs can read the file.

    Readers see the old file or the new one, and must detect damage themselves.

    Returns:
        Whether the file now has this content. If not, an older file stays as it was.
    """
    written = False
    if len(content) > LARGE:
        return written
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(number, "wb") as file:
                file.write(content)
            os.replace(name, path)
            written = True
        except OSError:
            os.unlink(name)
        _clear(path.parent)
    except OSError:
        pass
    return written


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Return a context for a path. While a process of this user is in the context for a path, other processes
    wait before they enter the context for the same path.

    A process enters after `PATIENCE` in any case, because the process inside may be waiting for it. On
    Windows, and if the folder cannot be locked, no process waits.
    """
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(os.stat(path.parent)):
                raise PermissionError  # nothing is read from there, so there is nothing to wait for
            file = stack.enter_context(open(os.open(path.parent / "lock", _LOCKING, 0o600), "ab"))
            # One lock file has a byte for each path. The system unlocks the byte when the process ends.
            offset = int.from_bytes(_SUM(path.name.encode()).digest()[:4], "big")
            until = time.monotonic_ns() + PATIENCE
            while time.monotonic_ns() < until:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                    break
                except (BlockingIOError, PermissionError):
                    time.sleep(0.02)
        yield


def _sum(path: Path, content: bytes) -> bytes:
    return _SUM(path.name.encode() + b"\n" + content).digest()


def _is_own(status: os.stat_result) -> bool:
    """Return whether only this user can have written a file."""
    user = getattr(os, "geteuid", None)
    return user is None or (status.st_uid == user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _clear(where: Path) -> None:
    """Remove the oldest files if there are more than `MANY`.

    Files dated more than a day in the future are removed first, because a wrong clock has dated them.
    """
    now, found = time.time(), []
    for entry in os.scandir(where):
        with contextlib.suppress(OSError):  # another process has removed it
            if entry.name != "lock" and not entry.is_dir(follow_symlinks=False):
                written = entry.stat(follow_symlinks=False).st_mtime
                found.append((written <= now + DAY, written, entry.path))
    for _, _, path in sorted(found)[: max(len(found) - MANY, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
