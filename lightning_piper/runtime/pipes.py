"""Pipes between processes of one machine: each brings one process's messages of few bytes to another, in their order.

Who waits is woken by who writes, and no thread stands between them. With a thread in each process that reads a socket, as gloo has
them, a message of few bytes takes the cores from what the step computes, several times.

What fails here is communication alone, and is told as torch tells it, by a `RuntimeError`: another process failed before
(`processes.failure`).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from lightning_piper.runtime.forks import in_forks

MOST = 2**12  # bytes of a message: Linux writes as many whole or not at all

_full = weakref.WeakSet["Outbox"]()  # that have messages left to write; one that nobody uses any more leaves them


def _bytes_of(x: torch.Tensor) -> memoryview:
    """Of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


class _End:
    """One end of a pipe, closed at the latest when nothing refers to it any more.

    Args:
        file: of the pipe.
        peer: names the process at the other end in errors.
        timeout: seconds, after which it is an error that nothing can be read or written.
    """

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        self.file, self._peer, self._timeout = file, peer, timeout
        self._closing = weakref.finalize(self, os.close, file)
        in_forks(self, _End.close)

    def close(self) -> None:
        self._closing()

    def _sleep(self, until: float | None, event: int) -> float:
        """Until it can be read or written, or what this process has left can be written elsewhere. Returns when the time is over.

        Args:
            until: the time is over; None when it begins.
        """
        now = time.monotonic()
        until = now + self._timeout if until is None else until
        if now >= until:
            raise RuntimeError(f"timed out after {self._timeout:g} s: {self._peer} does not answer")
        poll = select.poll()
        for outbox in _full:
            poll.register(outbox.file, select.POLLOUT)
        poll.register(self.file, event)
        poll.poll(1e3 * (until - now))
        for outbox in [*_full]:
            outbox.write()
        return until

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"connection closed by {self._peer}")


class Outbox(_End):
    """Messages to one process. What has no room in the pipe is written when this process sends there again, or waits."""

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        super().__init__(file, peer, timeout)
        self._unsent: deque[bytes] = deque()

    def send(self, x: torch.Tensor) -> list[Outbox]:
        """Of at most `MOST` bytes, contiguous; it may be changed at once. Returns what is to be waited for."""
        message = _bytes_of(x)
        self.write()
        if self._unsent or not self._written(message):
            self._unsent.append(bytes(message))
            _full.add(self)
            return [self]
        return []

    def wait(self) -> None:
        """Until all is written.

        Raises:
            RuntimeError: the process is gone, or the time is over.
        """
        until = None
        while self._unsent:
            until = self._sleep(until, select.POLLOUT)

    def write(self) -> None:
        """Write what has room now."""
        while self._unsent and self._written(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            _full.discard(self)

    def close(self) -> None:
        _full.discard(self)
        super().close()

    def _written(self, message: bytes | memoryview) -> bool:
        try:
            os.write(self.file, message)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            raise self._gone() from None
        return True


class Expected:
    """A message that is to come."""

    def __init__(self, inbox: Inbox, room: memoryview) -> None:
        self._inbox, self.room = inbox, room

    def wait(self) -> None:
        self._inbox.wait(self)


class Inbox(_End):
    """Messages from one process."""

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        super().__init__(file, peer, timeout)
        self._expected: deque[Expected] = deque()

    def receive(self, into: torch.Tensor) -> Expected:
        """The next message is of this size, which is at most `MOST` bytes, and goes there; contiguous."""
        expected = Expected(self, _bytes_of(into))
        if expected.room:
            self._expected.append(expected)
        return expected

    def wait(self, expected: Expected) -> None:
        """Until it is there; all that were sent before it are there then, too.

        Raises:
            RuntimeError: the process is gone, or the time is over.
        """
        until = None
        while expected.room:
            first = self._expected[0]
            try:
                count = os.readv(self.file, [first.room])
            except BlockingIOError:
                until = self._sleep(until, select.POLLIN)
                continue
            if not count:
                raise self._gone()
            first.room = first.room[count:]
            if not first.room:
                self._expected.popleft()


def pipes_for(peers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """A pipe for each: to read from, and to write to. Without those that the system does not give."""
    made = {}
    with contextlib.suppress(OSError):
        for peer in peers:
            made[peer] = os.pipe()
            os.set_blocking(made[peer][0], False)
    return made


def writing_end(process: int, file: int) -> int | None:
    """The end of another process's pipe to write to, opened here, if that is possible."""
    with contextlib.suppress(OSError):
        path = f"/proc/{process}/fd/{file}"
        if os.readlink(path).startswith("pipe:"):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return None
