"""Work that a thread does behind the training: one piece at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Thread that waits -> the one that it waits for. Who asks where the first one is wants to know where the second one is.
AWAITED: dict[int, int] = {}


class Behind:
    """Does one piece of work behind the training, and what is to follow it.

    The thread does not keep the process alive: who starts work waits for its end.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin, when the work before has ended.

        Raises:
            Exception: with which the work before has failed; then this one is not begun.
        """
        self.wait()
        self._works.append(work)
        self._busy = True
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def then(self, work: Callable[[], object]) -> None:
        """Do this after what is being done, or now if nothing is; not at all if that fails, or has failed and nobody knows yet."""
        with self._lock:
            if self._busy:
                self._works.append(work)
                return
            failed = self._error is not None
        if not failed:
            work()

    def wait(self, seconds: float | None = None) -> None:
        """Return when all is done, or after some seconds.

        Raises:
            Exception: with which the work has failed, once.
        """
        if (thread := self._thread) is not None:
            assert thread.ident is not None
            own = threading.get_ident()
            AWAITED[own] = thread.ident
            try:
                thread.join(seconds)
            finally:
                del AWAITED[own]
            if thread.is_alive():
                return
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException as error:  # the waiting thread raises it
            with self._lock:
                self._works.clear()
                self._busy, self._error = False, error

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._busy = bool(self._works)
            return self._works.popleft() if self._works else None
