"""Files that one run keeps for the next, in the user's cache folder: whole or absent, and read only where nobody else can write.

Whoever can write where this user writes can change the user's programs as well, so nothing is signed. What others can write is as
if it were not there, and so is what is damaged. A folder that cannot be written to is no error.
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

CACHE = "XDG_CACHE_HOME"  # names the folder in which the folder of this package is; ~/.cache if it is not set
MANY = 256  # files of a folder
LARGE = 1 << 26  # bytes of a file; what is larger is not kept
DAY = 86400.0  # seconds; no two clocks differ by so many
PATIENCE = 120 * 10**9  # nanoseconds to wait for another process that makes a file
_SUM = hashlib.sha256
_LOCKING = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe there would be waited for
_READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def folder(kind: str) -> Path:
    """Where files of this kind are; where there can be none, for a user without a home."""
    home = os.path.expanduser("~")
    own = os.environ.get(CACHE) or (os.devnull if home == "~" else os.path.join(home, ".cache"))
    return Path(own) / "lightning_piper" / kind


def read(path: Path) -> bytes | None:
    """What `write` has put there; None if it is not what was written under this name, or as for `read_plain`."""
    found, size = read_plain(path) or b"", _SUM().digest_size
    return found[size:] if found[:size] == _sum(path, found[size:]) else None


def read_plain(path: Path) -> bytes | None:
    """What `write_plain` has put there; None if there is none, if others may have written it, or if it is too
    large."""
    try:
        with open(os.open(path, _READING), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_own(status) and _is_own(os.stat(path.parent))) or status.st_size > LARGE:
                return None
            return file.read()
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Put a file there, in place of another one, with a sum by which damage is found. If it cannot be done, it is not."""
    write_plain(path, _sum(path, content) + content)


def write_plain(path: Path, content: bytes) -> None:
    """The same without a sum, for what others read, too. They see the old file or the new one, and find damage themselves."""
    if len(content) > LARGE:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(number, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
        _clear(path.parent)
    except OSError:
        pass


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """While one process of this user is inside with a path, others wait for it before they come in, but not for ever: it may wait
    for them."""
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(os.stat(path.parent)):
                raise PermissionError  # nothing is read from there, so there is nothing to wait for
            file = stack.enter_context(open(os.open(path.parent / "lock", _LOCKING, 0o600), "ab"))
            # A byte for each path, which nobody has to be there to give back.
            place, until = int.from_bytes(_SUM(path.name.encode()).digest()[:4], "big"), time.monotonic_ns() + PATIENCE
            while time.monotonic_ns() < until:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    break
                except (BlockingIOError, PermissionError):
                    time.sleep(0.02)
        yield


def _sum(path: Path, content: bytes) -> bytes:
    return _SUM(path.name.encode() + b"\n" + content).digest()


def _is_own(status: os.stat_result) -> bool:
    """Can nobody but this user have written to it?"""
    user = getattr(os, "geteuid", None)
    return user is None or (status.st_uid == user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _clear(where: Path) -> None:
    """Remove the oldest files, where there are many; first those of a day to come, which a wrong clock has dated."""
    now, found = time.time(), []
    for entry in os.scandir(where):
        with contextlib.suppress(OSError):  # another process has removed it
            if entry.name != "lock" and not entry.is_dir(follow_symlinks=False):
                written = entry.stat(follow_symlinks=False).st_mtime
                found.append((written <= now + DAY, written, entry.path))
    for _, _, path in sorted(found)[: max(len(found) - MANY, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
