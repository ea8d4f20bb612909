"""SIGTERM ends all processes of a run together, whichever of them it comes to.

Lightning's handler communicates at once, wherever the process is: in the middle of an exchange, or while others wait in one. So
here the signal is only noted, also by a process that waits, and the others are told on the failure watch's line. What follows
depends on how far the run is:

- No batch has been trained: nothing would be lost. Each process ends at its next exchange with others, or `SOON`.
- Later: Lightning begins each training batch with a word of rank 0 to all, which says it. All end before the same batch. A second
  signal to one process ends it at once, wherever it waits, and the watch ends the others.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_piper.processes import world
from lightning_piper.processes.failure import FailureWatch, end
from lightning_piper.runtime.forks import in_forks

SOON = 3.0  # seconds


class Termination:
    """The handler of SIGTERM for one run.

    Args:
        rank: of this process.
        watch: over the run's processes.
        error: what ends this process at an exchange; it is given a text.
    """

    def __init__(self, rank: int, watch: FailureWatch, error: Callable[[str], BaseException]) -> None:
        self._rank, self._watch, self._error = rank, watch, error
        self._by: int | None = None  # the rank that the signal came to first, as far as is known here
        self._trains = False
        self._over = threading.Event()
        self._restore = contextlib.ExitStack()

    def __reduce__(self) -> Any:
        return object, ()  # signals are for one process

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal has come. This is to be its handler."""
        self._note(self._rank)

    def begin(self) -> None:
        """The handler is in its place; called once, by the main thread."""
        # Python calls handlers when the main thread is done waiting for others. What it writes here comes at once.
        arrives, leaves = (in_forks(each, socket.socket.close) for each in socket.socketpair())
        leaves.setblocking(False)
        before = signal.set_wakeup_fd(leaves.fileno(), warn_on_full_buffer=False)
        in_forks(self, lambda _: _as_before(before))  # workers of data loaders are ended by the signal
        threading.Thread(target=self._listen, args=(arrives,), name="piper-signals", daemon=True).start()
        self._restore.callback(leaves.close)
        self._restore.callback(signal.set_wakeup_fd, before)
        self._watch.signalled = self._note

    def trains(self) -> None:
        """The first batch's step is about to run: from now on, processes end between batches."""
        self._trains = True

    def due(self) -> str | None:
        """Before each batch, on rank 0: why all are to end, if they are."""
        return None if self._by is None else f"SIGTERM came to rank {self._by}: all processes end before the next batch"

    def end(self) -> None:
        """The run is over."""
        self._over.set()
        self._watch.signalled = lambda rank: None
        self._restore.close()
        world.refuse_exchanges(None)

    def _listen(self, arrives: socket.socket) -> None:
        count = 0
        with arrives:
            while came := arrives.recv(1):
                if came[0] == signal.SIGTERM:
                    self._note(self._rank)
                    count += 1
                    if count > 1:
                        end(f"lightning_piper: rank {self._rank} ends, because SIGTERM came twice")

    def _note(self, rank: int) -> None:
        """The signal has come to this process, or another one says so; in any thread."""
        if self._by is not None:
            return
        self._by = rank
        if rank == self._rank:
            self._watch.pass_on()
        if not self._trains:
            said = f"lightning_piper: SIGTERM came to rank {rank} before a batch was trained; the run ends"
            world.refuse_exchanges(self._error(said))
            threading.Thread(target=self._end_soon, args=(said,), name="piper-termination", daemon=True).start()

    def _end_soon(self, said: str) -> None:
        if not self._over.wait(SOON):
            end(said)


def _as_before(wakeup: int) -> None:
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
