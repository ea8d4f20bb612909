"""Spares: processes that run the script up to `fit` and wait there, to replace lost processes of the run.

Rank 0 starts the spares with the other processes. Its store connects all of them for the whole run. When processes are
lost, the other processes meet at the store with spares that take the lost ranks. They are then a new generation: they
connect again, through another store of rank 0. If a process is lost before they are connected, rank 0 breaks that
store's connections, and the next generation begins. If the run has too few spares, the new generation may have fewer
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from subprocess import Popen
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_piper.errors import PiperError
from lightning_piper.runtime.connections import break_connections, keep_connections

# Variables of the environment: in each process, the number of spares that rank 0 has started; in a spare, its index.
SPARES, SPARE = "LIGHTNING_PIPER_SPARES", "LIGHTNING_PIPER_SPARE"
OFTEN = 0.005  # seconds between two looks of rank 0 at the store
_LONG = timedelta(days=20)  # a spare waits as long as the run; the store does not take a longer time
_FILES = "lightning_piper copies"
_OVER = "over"


class Spares:
    """The store and the spares of a run, seen from one of its processes.

    Args:
        host, port: Address of rank 0's store.
        size: Number of processes of the run.
        count: Number of spares that rank 0 has started.
        is_rank_zero: Whether this process has the store.
        timeout: Timeout of communication.
        runs_on: Returns whether the fit can run on a number of processes.

    Attributes:
        generation: How often the processes have met.
        left: Number of spares that wait, as of the last meeting.
        waiting: The spares that wait, on rank 0.
        files: For each rank, the descriptors of two anonymous files for the copies of its state. All processes share
            these files. Rank 0 has made them, so they stay if another process is lost.

    Raises:
        PiperError: This process cannot open rank 0's files.
    """

    def __init__(
        self,
        host: str,
        port: int,
        size: int,
        count: int,
        is_rank_zero: bool,
        timeout: timedelta,
        runs_on: Callable[[int], bool],
    ) -> None:
        self._store = dist.TCPStore(
            host, port, is_master=is_rank_zero, wait_for_workers=False, timeout=timeout
        )
        keep_connections(port)
        self.generation, self.left = 0, count
        self._host, self._is_rank_zero, self._timeout, self._runs_on = host, is_rank_zero, timeout, runs_on
        self._gone: set[int] = set()  # lost ranks of this generation that no spare takes
        self._first = 0  # index of the first spare that waits
        self._prepares = False  # whether spares may prepare themselves
        self.waiting: list[Popen[Any]] = []
        self.files = [(os.memfd_create(_FILES), os.memfd_create(_FILES)) for _ in range(size * is_rank_zero)]
        if is_rank_zero:
            self._store.set(_FILES, json.dumps([os.getpid(), self.files]))
            return
        process, files = json.loads(self._store.get(_FILES))
        try:
            for pair in files:
                first, second = (os.open(f"/proc/{process}/fd/{file}", os.O_RDWR) for file in pair)
                self.files.append((first, second))
        except OSError as error:
            raise PiperError(
                f"PiperStrategy(spares=...): this process cannot open memory of rank 0 ({error}). Start all processes as "
                "one user on one machine, or remove spares [PIPER-S003]"
            ) from error

    def group_store(self) -> dist.Store:
        """Make the store for the process groups of this generation. Collective."""
        key = f"port of generation {self.generation}"
        port = 0 if self._is_rank_zero else int(self._store.get(key))
        store = dist.TCPStore(
            self._host, port, is_master=self._is_rank_zero, wait_for_workers=False, timeout=self._timeout
        )
        if self._is_rank_zero:
            self._store.set(key, str(store.port))
        return store

    @contextlib.contextmanager
    def connecting(self, others: Sequence[Popen[Any]]) -> Iterator[None]:
        """Inside of this context, break connections if the processes cannot connect, so that none waits for another.
        Rank 0 breaks its connections if one of the other processes ends. Each process breaks its connections after an
        error. Its groups may stay open, and another process would wait for it. While `generation` is 0, Lightning's
        observer ends the run instead."""
        if not self.generation:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while not over.wait(OFTEN):
                if any(other.poll() is not None for other in others):
                    break_connections()

        watching = threading.Thread(target=look, name="piper-spares-watch", daemon=True)
        if self._is_rank_zero:
            watching.start()
        try:
            yield
        except Exception:
            break_connections()
            raise
        finally:
            over.set()
            if self._is_rank_zero:
                watching.join()

    def prepare(self) -> None:
        """Tell the spares to prepare themselves, because the other processes have captured the step. Rank 0 does this
        once."""
        for index in range(self._first, self._first + len(self.waiting) * (not self._prepares)):
            self._store.set(f"spare {index} prepares", "")
        self._prepares = True

    def wait_to_prepare(self) -> bool:
        """Return whether this spare may prepare itself now, before `wait_for_rank`. It may not if it takes a rank already,
        or the run has ended."""
        key = f"spare {os.environ[SPARE]}"
        with contextlib.suppress(dist.DistError):  # rank 0 is gone
            self._store.wait([f"{key} prepares"], _LONG)
            return not self._store.check([key])
        return False

    def wait_for_rank(self) -> tuple[int, list[int]] | None:
        """Return the rank that this spare takes, and the result of `join`. None if the run has ended without it."""
        key = f"spare {os.environ[SPARE]}"
        try:
            self._store.wait([key], _LONG)
            found = self._store.get(key).decode()
        except dist.DistError:  # rank 0 is gone
            return None
        if found == _OVER:
            return None
        rank, self.generation = map(int, found.split())
        stay = self.join(rank)
        return None if stay is None else (rank, stay)

    def end(self) -> None:
        """Close the files. On rank 0, tell all waiting spares to end, and let `join` return None."""
        if self._is_rank_zero:
            self.refuse()
        for index in range(self._first, self._first + len(self.waiting)):
            self._tell(index, _OVER)
        self.waiting = []
        while self.files:
            for file in self.files.pop():
                os.close(file)

    def replace(self, others: list[Popen[Any]], lost: Collection[int] = ()) -> list[int] | None:
        """Let spares take the ranks of processes that have ended. Rank 0 calls it.

        Args:
            others: The other processes, in the order of their ranks. Spares replace processes in this list.
            lost: Ranks that are lost, even if their processes have not ended yet.

        Returns:
            The lost ranks. None if the run has too few spares, and cannot run on fewer processes. In this case, `join`
            returns None.
        """
        ranks = [
            r
            for r, other in enumerate(others, 1)
            if r not in self._gone and (r in lost or other.poll() is not None)
        ]
        for rank in ranks:
            if (spare := self._take(rank)) is not None:
                others[rank - 1] = spare
            else:
                self._gone.add(rank)
        if self._gone and not self._runs_on(1 + len(others) - len(self._gone)):
            self.refuse()
            return None
        return ranks

    def _take(self, rank: int) -> Popen[Any] | None:
        """Give a rank to the next spare, and return its process. None if no spare is left."""
        while self.waiting:
            spare = self.waiting.pop(0)
            self._first += 1
            if spare.poll() is None:
                self._tell(self._first - 1, f"{rank} {self.generation}")
                return spare
        return None

    def _tell(self, index: int, what: str) -> None:
        """Send a message to a spare that waits, whether or not it has prepared itself."""
        for key in (f"spare {index}", f"spare {index} prepares"):
            self._store.set(key, what)

    def gather(self, others: list[Popen[Any]]) -> tuple[list[int], list[int]] | None:
        """Wait until all other processes have called `join`, and begin a new generation. Rank 0 calls it.

        Args:
            others: The other processes, in the order of their ranks. If one of them ends, a spare replaces it. Afterwards
                the list has the processes of the new generation.

        Returns:
            The ranks that were lost during the wait, and the result of `join`. None if the run cannot continue, or a
            process does not call `join` in time. In this case, `join` returns None.
        """
        ends = time.monotonic() + self._timeout.total_seconds()
        found: list[int] = []
        while not self._have_joined(stay := [r for r in range(1, len(others) + 1) if r not in self._gone]):
            ranks = self.replace(others)
            if ranks is None or time.monotonic() > ends:
                self.refuse()
                return None
            found += ranks
            time.sleep(OFTEN)
        others[:] = [others[rank - 1] for rank in stay]
        self.left = len(self.waiting)
        self._store.set(self._key("answer"), json.dumps([self.left, [0, *stay]]))
        self.generation += 1
        self._gone = set()
        return found, [0, *stay]

    def _have_joined(self, ranks: Sequence[int]) -> bool:
        return not ranks or self._store.check([self._key(rank) for rank in ranks])

    def refuse(self) -> None:
        """Make `join` return None on the other processes, because the run cannot continue. Rank 0 calls it."""
        self._store.set(self._key("answer"), json.dumps(None))

    def join(self, rank: int) -> list[int] | None:
        """Wait for rank 0's `gather`. Other ranks call it.

        Returns:
            The ranks whose processes, or spares for them, are the new generation. Their positions in the list are their
            new ranks. None if the run cannot continue.
        """
        self._store.set(self._key(rank), "")
        try:
            self._store.wait([self._key("answer")], self._timeout)
            answer = json.loads(self._store.get(self._key("answer")))
        except dist.DistError:  # rank 0 is gone
            return None
        if answer is None:
            return None
        self.left, stay = answer
        self.generation += 1
        return list(stay)

    def _key(self, what: object) -> str:
        return f"after generation {self.generation}: {what}"


def end_spare() -> NoReturn:
    """End this process, which has waited as a spare. The script does not continue, because it has no result."""
    sys.stdout.flush()
    os._exit(0)
