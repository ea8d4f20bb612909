"""The connections of process groups. gloo cannot abort an operation, and TCP does not report that the other machine is
gone: an operation waits until its timeout. Breaking its connection ends the operation with an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

OFTEN = 0.0005  # seconds between two looks of `wait_for`
_FILES = Path("/proc/self/fd")

_made: dict[str, int] = {}  # text that identifies a socket -> its file descriptor when the socket was made
_before: dict[str, int] | None = None  # inside of `noted_connections`: the sockets from before
_kept: set[int] = set()  # ports whose connections stay


@contextlib.contextmanager
def noted_connections() -> Iterator[None]:
    """Note the sockets that this block makes, such as the sockets of a new group."""
    global _before
    before = _before = _sockets()
    try:
        yield
    finally:
        now, _before = _sockets(), None
        for name in [*_made]:
            if now.get(name) != _made[name]:  # closed
                del _made[name]
        _made.update((name, file) for name, file in now.items() if name not in before)


def keep_connections(port: int) -> None:
    """Do not break connections from or to this port. A store may accept a connection while a group is made."""
    _kept.add(port)


def break_connections() -> None:
    """Break the noted connections that are still open. Operations that wait for a message raise a RuntimeError."""
    for name, file in _sockets().items():
        if _made.get(name) == file or (_before is not None and name not in _before):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as found:
                # `getpeername` raises an error for a socket that listens. gloo aborts the process if it is broken.
                if _kept.isdisjoint((found.getpeername()[1], found.getsockname()[1])):
                    found.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """Return the open sockets of this process: a text that identifies the socket -> its file descriptor. Empty on
    systems that do not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for file in os.listdir(_FILES):
            with contextlib.suppress(OSError):  # the file is closed now
                name = os.readlink(_FILES / file)
                if name.startswith("socket:"):
                    found[name] = int(file)
    return found


def wait_for(reached: Callable[[], bool], lost: Callable[[], bool]) -> None:
    """Wait for other processes until `reached` returns True.

    Raises:
        RuntimeError: `lost` returns True, because a process is lost.
    """
    while not reached():
        if lost():
            raise RuntimeError("this process waits for a process that is lost")
        time.sleep(OFTEN)
