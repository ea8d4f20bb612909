"""Background work: one thread that runs one task at a time while the training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Identifier of a waiting thread -> identifier of the thread that it waits for. The failure watch reports
# where the awaited thread is, and not where the waiting thread is.
AWAITED: dict[int, int] = {}
# Identifier of a thread -> the call in which it waits until all processes have made this call.
MEETING: dict[int, str] = {}


class BackgroundThread:
    """A background thread that runs one task, and the tasks queued after it.

    The thread is a daemon and does not keep the process alive. So the caller of `start` must `wait` for the
    end of the task.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: deque[Callable[[], object]] = deque()  # tasks that have not begun
        self._thread: threading.Thread | None = None
        self._busy = False  # whether the thread runs a task, or will run one
        self._error: BaseException | None = None  # the error that `wait` must raise

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the previous task, then start this one.

        Raises:
            Exception: The error of the previous task. This task is then not started.
        """
        self.wait()
        self._works.append(work)
        self._busy = True
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def then(self, work: Callable[[], object]) -> None:
        """Run a task after the running tasks. If no task is running, run it now, in the caller's thread.

        The task does not run if an earlier task fails, or has failed with an error that `wait` has not raised
        yet.
        """
        with self._lock:
            if self._busy:
                self._works.append(work)
                return
            failed = self._error is not None
        if not failed:
            work()

    def wait(self, seconds: float | None = None) -> None:
        """Return when all tasks are done, or after `seconds` (None: no limit).

        Raises:
            Exception: The error of a failed task; it is raised once.
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
        except BaseException as error:  # `wait` raises it in the waiting thread
            with self._lock:
                self._works.clear()
                self._busy, self._error = False, error

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._busy = bool(self._works)
            return self._works.popleft() if self._works else None
