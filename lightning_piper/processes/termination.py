"""SIGTERM ends all processes of a run together, whichever process receives it.

Lightning's handler communicates immediately, wherever the process is: in the middle of an exchange, or while
other processes wait in one. Here the handler only records the signal, even in a process that waits, and the
failure watch passes it on to the other processes. The next step depends on how far the run is:

- Before the first trained batch, nothing would be lost. Each process ends at its next exchange with other
  processes, or after `SOON` seconds.
- Later, rank 0's broadcast at the start of each training batch (under local SGD, of each round) announces the end,
  and all processes end before the same batch. A second signal to a process ends this process immediately, wherever it waits, and
  the watch ends the other processes.
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
from lightning_piper.runtime.same_machine.forks import in_forks

SOON = 3.0  # seconds after SIGTERM in which a process that has not trained a batch may end by itself


class Termination:
    """The SIGTERM handler of one run.

    Args:
        rank: Rank of this process.
        watch: The watch over the run's processes.
        error: Returns an exception with the given text, which ends this process at an exchange.
    """

    def __init__(self, rank: int, watch: FailureWatch, error: Callable[[str], BaseException]) -> None:
        self._rank, self._watch, self._error = rank, watch, error
        self._by: int | None = None  # the rank that received the signal first, as far as this process knows
        self._trains = False  # whether the first step has begun
        self._over = threading.Event()  # set when the run is over
        self._restore = contextlib.ExitStack()  # closing it restores the previous signal state

    def __reduce__(self) -> Any:
        return object, ()  # A signal concerns one process, so a pickled copy is an empty object.

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the signal. Install this function as the signal's handler."""
        self._note(self._rank)

    def begin(self) -> None:
        """Start listening for signals. Called once, by the main thread, after the handler is installed."""
        # Python calls handlers only when the main thread stops waiting for other processes. The wakeup socket
        # receives the signal's number immediately.
        arrives, leaves = (in_forks(each, socket.socket.close) for each in socket.socketpair())
        leaves.setblocking(False)
        before = signal.set_wakeup_fd(leaves.fileno(), warn_on_full_buffer=False)
        # Workers of data loaders are forks. They do not keep these handlers, because SIGTERM must end them.
        in_forks(self, lambda _: _restore_signals(before))
        threading.Thread(target=self._listen, args=(arrives,), name="piper-signals", daemon=True).start()
        self._restore.callback(leaves.close)
        self._restore.callback(signal.set_wakeup_fd, before)
        self._watch.signaled = self._note

    def trains(self) -> None:
        """Record that the first step is about to run. From now on, processes end between batches."""
        self._trains = True

    def due(self) -> str | None:
        """Return why all processes must end before the next batch; None if they continue. Rank 0 calls it
        before each batch."""
        return (
            None
            if self._by is None
            else f"SIGTERM came to rank {self._by}: all processes end before the next batch"
        )

    def end(self) -> None:
        """Stop listening and restore the previous signal state, because the run is over."""
        self._over.set()
        self._watch.signaled = lambda rank: None
        self._restore.close()
        world.refuse_exchanges(None)

    def _listen(self, arrives: socket.socket) -> None:
        """Read the numbers of signals from the wakeup socket. A second SIGTERM ends the process immediately."""
        count = 0
        with arrives:
            while came := arrives.recv(1):
                if came[0] == signal.SIGTERM:
                    self._note(self._rank)
                    count += 1
                    if count > 1:
                        end(f"lightning_piper: rank {self._rank} ends, because SIGTERM came twice")

    def _note(self, rank: int) -> None:
        """Record that this process or another process received the signal. Called in any thread.

        Before the first trained batch, also make this process end: at its next exchange, or soon.
        """
        if self._by is not None:
            return
        self._by = rank
        if rank == self._rank:
            self._watch.pass_on()
        if not self._trains:
            said = f"lightning_piper: SIGTERM came to rank {rank} before a batch was trained; the run ends"
            world.refuse_exchanges(self._error(said))
            threading.Thread(
                target=self._end_soon, args=(said,), name="piper-termination", daemon=True
            ).start()

    def _end_soon(self, said: str) -> None:
        if not self._over.wait(SOON):
            end(said)


def _restore_signals(wakeup: int) -> None:
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
