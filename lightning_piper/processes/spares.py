"""Spares: processes that run the script up to `fit` and wait there, to replace processes of the run that are lost.

Rank 0 starts the spares with the other processes. Its store connects all of them for the whole run. When a process is
lost, the other processes meet at the store with a spare that takes the lost rank. They are then a new generation: they
connect again, under new names in the store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from subprocess import Popen
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_piper.errors import PiperError
from lightning_piper.runtime.connections import keep_connections

# Variables of the environment: in each process, the number of spares that rank 0 has started; in a spare, its index.
SPARES, SPARE = "LIGHTNING_PIPER_SPARES", "LIGHTNING_PIPER_SPARE"
OFTEN = 0.005  # seconds between two looks of rank 0 at the store
_LONG = timedelta(days=20)  # a spare waits as long as the run; the store does not take a longer time
_FILES = "lightning_piper copies"
_OVER, _MEET, _STOP = "over", "meet", "stop"


class Spares:
    """The store and the spares of a run, seen from one of its processes.

    Args:
        host, port: Address of rank 0's store.
        is_rank_zero: Whether this process has the store.
        timeout: Timeout of communication.

    Attributes:
        generation: How many processes have been replaced.
        waiting: The spares that wait, on rank 0.
        files: For each rank, the descriptors of two anonymous files for the copies of its state. All processes share
            these files. Rank 0 has made them, so they stay if another process is lost.

    Raises:
        PiperError: This process cannot open rank 0's files.
    """

    def __init__(self, host: str, port: int, size: int, is_rank_zero: bool, timeout: timedelta) -> None:
        self._store = dist.TCPStore(
            host, port, is_master=is_rank_zero, wait_for_workers=False, timeout=timeout
        )
        keep_connections(port)
        self.generation = 0
        self._timeout = timeout
        self._first = 0  # index of the first spare that waits
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

    @property
    def group_store(self) -> dist.Store:
        """The store for the process groups of this generation."""
        return dist.PrefixStore(f"generation {self.generation}", self._store)

    def wait_for_rank(self) -> int | None:
        """Return the rank that this spare takes. None if the run has ended without it."""
        key = f"spare {os.environ[SPARE]}"
        try:
            self._store.wait([key], _LONG)
            found = self._store.get(key).decode()
        except dist.DistError:  # rank 0 is gone
            return None
        if found == _OVER:
            return None
        rank, self.generation = map(int, found.split())
        return rank if self.join(rank) else None

    def end(self) -> None:
        """Close the files. On rank 0, let the spares end that still wait, because the run needs no spare any more."""
        for index in range(self._first, self._first + len(self.waiting)):
            self._store.set(f"spare {index}", _OVER)
        self.waiting = []
        while self.files:
            for file in self.files.pop():
                os.close(file)

    def take(self, rank: int) -> Popen[Any] | None:
        """Give a rank to the next spare, and return its process. None if no spare is left. Rank 0 calls it."""
        while self.waiting:
            spare, key = self.waiting.pop(0), f"spare {self._first}"
            self._first += 1
            if spare.poll() is None:
                self._store.set(key, f"{rank} {self.generation}")
                return spare
        return None

    def gather(self, others: Sequence[Popen[Any]]) -> bool:
        """Wait until all other processes have called `join`, and begin a new generation. Rank 0 calls it.

        Args:
            others: The other processes, in the order of their ranks.

        Returns:
            False if one of them has ended; then `join` also returns False.
        """
        keys = [self._key(rank) for rank in range(1, len(others) + 1)]
        ends = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check(keys):
            if any(other.poll() is not None for other in others) or time.monotonic() > ends:
                self.refuse()
                return False
            time.sleep(OFTEN)
        self._store.set(self._key("answer"), _MEET)
        self.generation += 1
        return True

    def refuse(self) -> None:
        """Let `join` return False on the other processes, because the run cannot continue. Rank 0 calls it."""
        self._store.set(self._key("answer"), _STOP)

    def join(self, rank: int) -> bool:
        """Wait for rank 0's `gather`, and return whether a new generation begins. Other ranks call it."""
        self._store.set(self._key(rank), "")
        try:
            self._store.wait([self._key("answer")], self._timeout)
            if self._store.get(self._key("answer")).decode() == _STOP:
                return False
        except dist.DistError:  # rank 0 is gone
            return False
        self.generation += 1
        return True

    def _key(self, what: object) -> str:
        return f"after generation {self.generation}: {what}"


def end_spare() -> NoReturn:
    """End this process, which has waited as a spare. The script does not continue, because it has no result."""
    sys.stdout.flush()
    os._exit(0)
