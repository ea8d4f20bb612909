"""When one process fails, all fail soon, and say which one failed first and why.

A process that exits closes its connections, and the others notice at once. But they see no more than that a neighbour is gone,
which may itself have ended because of another; and one that failed may live on (its script caught the error) or hang, and gloo
has no way to break off an operation that others wait in. So every process keeps a line to the lead, where one thread judges who
failed first:

- who says that it failed, with an error of its own;
- else, whose line breaks: it was killed;
- where all that is said is that communication timed out: who does not answer on the line (a stopped process), or answers that
  it is not waiting for anybody; failing that, who said so first.

All are told the verdict. It becomes a note on their own errors, and one that has not ended by itself a few seconds later is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any

import torch.distributed as dist

from lightning_piper import runtime
from lightning_piper.errors import PiperError
from lightning_piper.strategy import agreement
from lightning_piper.strategy.world import LEAD, World

GRACE = 5.0  # seconds for a process to fail by itself, with a better message
SETTLE = 2.0  # seconds from the first word of a communication that failed until the verdict
PATIENCE = 5.0  # seconds for the lead to answer
LONGEST = 4000  # characters of an error that are passed on

GONE = "it ended without a word (killed, or short of memory), or lost its connection"
SILENT = "it does not answer: the process is stopped, or its machine or network is gone"
WAITING_IN = tuple(str(Path(str(module.__file__)).parent) for module in (dist, runtime)) + (str(agreement.__file__),)

Message = dict[str, Any]


class FailureWatch:
    """Watches over one fit.

    Args:
        world: more than one process.
        host: address of the lead.
        launcher: if it is Lightning's, what it has started in this process nobody else would end.

    Making one is collective.

    Raises:
        PiperError: a process cannot reach the lead.
    """

    def __init__(self, world: World, host: str, launcher: object) -> None:
        self._world = world
        self._children = dict(enumerate(getattr(launcher, "procs", ()), world.rank + 1))
        self._fitting = threading.get_ident()
        self._over, self._judged = threading.Event(), threading.Event()
        self._first: tuple[int, str] | None = None
        server = _listen() if world.leads else None
        port, token = world.broadcast(None if server is None else (server.getsockname()[1], secrets.token_hex()))  # type: ignore[misc]
        if server is not None:
            judge = _Judge(server, world.size, token)
            threading.Thread(target=judge.run, name="piper-failure-judge", daemon=True).start()
        self._line = _connect("localhost" if world.leads else host, port)
        _send(self._line, {"token": token, "rank": world.rank})
        self._thread = threading.Thread(target=self._listen, name="piper-failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The fit has ended on this process, well or not."""
        self._over.set()
        _send(self._line, {"over": True})
        if self._first is None:  # else the lead may be one that does not answer
            self._thread.join(PATIENCE)

    def report(self, error: BaseException) -> None:
        """Tell the others that this process has failed; if another one did so before, note on the error who and why."""
        text = f"{type(error).__name__}: {error}"[:LONGEST]
        rank = getattr(error, "rank", None)
        _send(self._line, {"failed": text, "rank": self._world.rank if rank is None else rank, "waited": waited(error)})
        if not self._judged.wait(PATIENCE):
            self._first = (LEAD, SILENT)
        assert self._first is not None
        first, why = self._first
        if first != self._world.rank and why != text:
            error.add_note(f"The first process to fail was rank {first}: {why}")

    def _listen(self) -> None:
        lead_left = False
        while True:
            message = _receive(self._line)
            if message is None or "first" in message:
                break
            if "where" in message:
                _send(self._line, place_of(self._fitting))
            lead_left |= "left" in message
        self._line.close()
        if message is None and (lead_left or self._over.is_set()):
            return
        self._first = (LEAD, GONE) if message is None else (message["first"], message["why"])
        self._judged.set()
        for rank in () if message is None else message["silent"]:
            if rank in self._children:
                self._children[rank].kill()
        if not self._over.wait(GRACE):
            first, why = self._first
            said = f"rank {self._world.rank} ends, for it would wait in vain: the first process to fail was rank {first}: {why}"
            print(f"lightning_piper: {said}", file=sys.stderr, flush=True)
            os._exit(1)


class _Judge:
    """The lead's end of all lines, its own included.

    Attributes:
        lines: that are open -> rank; None before it has said who it is.
        ended: ranks whose fit is over.
        failed: what ranks said whose communication failed, in the order in which they did.
        places: where ranks are, of those that answered.
    """

    def __init__(self, server: socket.socket, size: int, token: str) -> None:
        self._server, self._size, self._token = server, size, token
        self.lines: dict[Connection, int | None] = {}
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.places: dict[int, Message] = {}
        self._until: float | None = None  # when the verdict is due

    def run(self) -> None:
        verdict: tuple[int, str] | None = None
        while verdict is None and len(self.ended) < self._size:
            for ready in wait(
                [self._server, *self.lines], None if self._until is None else max(0.0, self._until - time.monotonic())
            ):
                if ready is self._server:
                    self.lines[_line(self._server.accept()[0])] = None
                else:
                    assert isinstance(ready, Connection)
                    verdict = verdict or self._heard(ready)
            if verdict is None and self._until is not None and time.monotonic() >= self._until:
                verdict = self._verdict()
        self._server.close()
        if verdict is not None:
            self._tell({"first": verdict[0], "why": verdict[1], "silent": self._silent() if verdict[1] == SILENT else []})
        while self.lines:  # until all have gone: a line that breaks would look like the end of the lead
            for ready in wait(list(self.lines)):
                assert isinstance(ready, Connection)
                if _receive(ready) is None:
                    self._drop(ready)

    def _heard(self, line: Connection) -> tuple[int, str] | None:
        """The verdict, if what a rank says, or that its line broke, decides it."""
        rank, message = self.lines[line], _receive(line)
        if rank is None:
            if message is None or not secrets.compare_digest(str(message.get("token")), self._token):
                self._drop(line)  # of nobody in this run
            else:
                self.lines[line] = message["rank"]
        elif message is None:
            self._drop(line)
            return None if rank in self.failed else (rank, GONE)
        elif "over" in message:
            self.ended.add(rank)
            if rank == LEAD:
                self._tell({"left": True})
            self._drop(line)
        elif "at" in message:
            self.places[rank] = message
        elif not message["waited"]:
            return message["rank"], message["failed"]
        else:
            self.failed.setdefault(rank, message["failed"])
            if self._until is None:
                self._until = time.monotonic() + SETTLE
                self._tell({"where": True})
        return None

    def _verdict(self) -> tuple[int, str]:
        """Of failures in waiting for others alone."""
        if silent := self._silent():
            return silent[0], SILENT
        if any(re.search(r"time(d )?out", text, re.IGNORECASE) for text in self.failed.values()):
            for rank, place in sorted(self.places.items()):
                if not place["waits"] and rank not in self.failed and rank not in self.ended:
                    return rank, f"it hangs, or takes longer than the timeout of communication: {place['at']}"
        return next(iter(self.failed.items()))

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in {*self.places, *self.failed, *self.ended}]

    def _tell(self, message: Message) -> None:
        for line, rank in self.lines.items():
            if rank is not None:
                _send(line, message)

    def _drop(self, line: Connection) -> None:
        del self.lines[line]
        line.close()


# Where a process is


def waited(error: BaseException) -> bool:
    """Did a communication fail, and nothing else? Then another process failed before."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and not isinstance(error, PiperError) and bool(frames) and _waits(frames[-1].f_code)


def place_of(thread: int) -> Message:
    """What a thread is doing."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"waits": False, "at": "its thread has ended"}
    code = frame.f_code
    return {"waits": _waits(code), "at": f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"}


def _waits(code: CodeType) -> bool:
    """Functions in which a thread stands only while it communicates."""
    return code.co_filename.startswith(WAITING_IN)


# Lines


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _connect(host: str, port: int) -> Connection:
    try:
        return _line(socket.create_connection((host, port), PATIENCE))
    except OSError as error:
        raise PiperError(
            f"PiperStrategy: this process cannot reach port {port} of rank 0 at {host} ({error}); let the processes of a run reach "
            "each other on all ports, and give the address of rank 0's machine as MASTER_ADDR"
        ) from error


def _line(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    return Connection(connected.detach())


def _send(line: Connection, message: Message) -> None:
    """To one who may be gone, which is noticed where messages are received."""
    with contextlib.suppress(OSError, ValueError):
        line.send_bytes(json.dumps(message).encode())


def _receive(line: Connection) -> Message | None:
    """None: the line is broken."""
    try:
        message = json.loads(line.recv_bytes(16 * LONGEST))
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, dict) else None
