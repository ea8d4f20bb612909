"""When one process fails, all fail soon, and say which one failed first and why.

A process that exits closes its connections, and the others notice at once. But one that failed may live on (its script caught
the error) or hang, and gloo has no way to break off an operation that others wait in. So the first failure is written on a
board that every process watches; one that has not ended by itself a few seconds later is ended.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from lightning_piper.strategy.world import World

PERIOD = 1.0  # seconds between two looks at the board
GRACE = 5.0  # seconds for a process to fail by itself, with a better message
PATIENCE = timedelta(seconds=5)  # for the board to answer: the lead, which has it, may be gone


class _Board:
    """The store in which failures are written; the lead keeps it, on a free port. One for as long as the default group lives.

    Attributes:
        group: the default group.
        fits: how many were watched so far, the same on all processes.
    """

    def __init__(self, world: World, host: str) -> None:
        self.group, self.fits = dist.group.WORLD, 0
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE) if world.leads else None
        port = world.broadcast(None if server is None else server.port)
        assert port is not None
        self.store = server or dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)


_board: _Board | None = None


class FailureWatch:
    """Watches over one fit.

    Args:
        world: more than one process.
        host: address of the lead.

    Making one is collective.
    """

    def __init__(self, world: World, host: str) -> None:
        global _board
        if _board is None or _board.group is not dist.group.WORLD:
            _board = _Board(world, host)
        _board.fits += 1
        self._world, self._store, self._key = world, _board.store, f"failure of fit {_board.fits}"
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="piper-failure-watch", daemon=True).start()

    def stop(self) -> None:
        """The fit has ended on this process, well or not."""
        self._over.set()

    def report(self, error: BaseException) -> None:
        """Tell the others that this process has failed; if another one did so before, note on the error who and why."""
        try:
            first = self._store.compare_set(self._key, "", f"rank {self._world.rank}: {type(error).__name__}: {error}").decode()
        except RuntimeError:
            return  # the lead is gone, and the others know it
        if not first.startswith(f"rank {self._world.rank}:"):
            error.add_note(f"The first process to fail was {first}")

    def _watch(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                if not self._store.check([self._key]):
                    continue
                first = self._store.get(self._key).decode()
            except RuntimeError:
                return
            if not self._over.wait(GRACE):
                why = f"rank {self._world.rank} ends, for it would wait in vain: the first process to fail was {first}"
                print(f"lightning_piper: {why}", file=sys.stderr, flush=True)
                os._exit(1)
            return
