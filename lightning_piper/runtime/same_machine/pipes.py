"""Pipes between processes of one machine. Each pipe carries small messages from one process to another, in
order.

A writer wakes the waiting reader directly, without a thread in between. gloo has a thread in each process
that reads a socket. These threads interrupt the step's computation several times for a message of few bytes.

Only communication can fail here, and it fails like in torch, with a `RuntimeError`. Callers then look for
another process that failed earlier (`processes.failure`).
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

from lightning_piper.runtime.same_machine.forks import in_forks

MOST = 2**14  # maximum bytes of a message; a pipe holds a few of them

# Outboxes with unwritten messages. The set is weak, so that it does not keep an outbox alive that nobody
# uses.
_full = weakref.WeakSet["Outbox"]()
_open = weakref.WeakSet["_End"]()


def bytes_of(x: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


class _End:
    """One end of a pipe. It is closed by `close`, or when this object is garbage-collected.

    Args:
        file: The file descriptor of the pipe.
        peer: The name, in errors, of the process at the other end.
        timeout: Seconds to wait for the pipe before an error.
    """

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        self.file, self._peer, self._timeout = file, peer, timeout
        self._closing = weakref.finalize(self, os.close, file)
        in_forks(self, _End.close)
        _open.add(self)

    def close(self) -> None:
        self._closing()

    def _sleep(self, until: float | None, event: int) -> float:
        """Sleep until the pipe, or any outbox with unwritten messages, is ready. Then write what fits into
        these outboxes.

        Args:
            until: The end of the time limit; None to start the time limit now.
            event: The event of the pipe to wait for, as in `select`.

        Returns:
            The end of the time limit.

        Raises:
            RuntimeError: The time limit is over.
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
    """An end that sends messages to one process.

    If a message does not fit into the pipe, it is written when this process next sends there or waits for any
    pipe.
    """

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        super().__init__(file, peer, timeout)
        self._unsent: deque[bytes] = deque()

    def send(self, x: torch.Tensor) -> list[Outbox]:
        """Send a contiguous tensor of at most `MOST` bytes. The caller may change it immediately.

        Returns:
            The works to wait for: none if the message is written, otherwise this outbox.

        Raises:
            RuntimeError: The process at the other end is gone.
        """
        return self.send_bytes(bytes_of(x))

    def send_bytes(self, message: memoryview) -> list[Outbox]:
        """Send bytes like `send`."""
        if self._unsent:
            self.write()
        if not self._unsent:
            message = message[self._written(message) :]
            if not message:
                return []
        self._unsent.append(bytes(message))
        _full.add(self)
        return [self]

    def wait(self) -> None:
        """Wait until all messages are written.

        Raises:
            RuntimeError: The process is gone, or the time limit is over.
        """
        until = None
        while self._unsent:
            until = self._sleep(until, select.POLLOUT)

    def write(self) -> None:
        """Write the waiting messages that fit into the pipe now.

        Raises:
            RuntimeError: The process at the other end is gone.
        """
        while self._unsent:
            message = self._unsent[0]
            count = self._written(message)
            if count < len(message):
                self._unsent[0] = message[count:]
                return
            self._unsent.popleft()
        _full.discard(self)

    def close(self) -> None:
        _full.discard(self)
        super().close()

    def _written(self, message: bytes | memoryview) -> int:
        """Write what fits into the pipe now. Return the number of written bytes."""
        try:
            return os.write(self.file, message)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._gone() from None


class Expected:
    """A message that an inbox expects, as a work to wait for. `room` is the memory for the bytes that have
    not arrived yet; it is empty when the whole message has arrived."""

    def __init__(self, inbox: Inbox, room: memoryview) -> None:
        self._inbox, self.room = inbox, room

    def wait(self) -> None:
        self._inbox.wait(self)


class Inbox(_End):
    """An end that receives messages from one process."""

    def __init__(self, file: int, peer: str, timeout: float) -> None:
        super().__init__(file, peer, timeout)
        self._expected: deque[Expected] = deque()

    def receive(self, into: torch.Tensor) -> Expected:
        """Return a work that receives the next message into `into`, a contiguous tensor of the message's
        size, at most `MOST` bytes. `wait` of the work fills the tensor. An empty tensor receives nothing."""
        return self.receive_bytes(bytes_of(into))

    def receive_bytes(self, into: memoryview) -> Expected:
        """Receive bytes like `receive`."""
        expected = Expected(self, into)
        if expected.room:
            self._expected.append(expected)
        return expected

    def wait(self, expected: Expected) -> None:
        """Wait until this message has arrived, and with it all messages that were sent before it.

        Raises:
            RuntimeError: The process is gone, or the time limit is over.
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


def close_pipes() -> None:
    """Close all pipes of this process, because it sends no more messages. Then no process waits for its messages."""
    for end in [*_open]:
        end.close()


def pipes_for(peers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Create a pipe to receive from each peer. Return peer -> (descriptor of the reading end, descriptor of
    the writing end). If the system cannot create a pipe, return only the pipes before it.
    """
    made = {}
    with contextlib.suppress(OSError):
        for peer in peers:
            made[peer] = os.pipe()
            os.set_blocking(made[peer][0], False)
    return made


def writing_end(process: int, file: int) -> int | None:
    """Open, in this process, the writing end of another process's pipe, and return its descriptor. Return
    None if that is impossible.

    Args:
        process: The ID of the other process.
        file: The descriptor of the writing end in the other process.
    """
    with contextlib.suppress(OSError):
        path = f"/proc/{process}/fd/{file}"
        if os.readlink(path).startswith("pipe:"):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return None
