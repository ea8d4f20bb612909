"""When one process fails, all fail soon, and say which one failed first and why.

A process that exits closes its connections, and the others notice at once. But they see no more than that a neighbour is gone,
which may itself have ended because of another; and one that failed may live on (its script caught the error) or hang, and gloo
has no way to break off an operation that others wait in. So every process keeps a line to rank 0, where one thread judges who
failed first:

- who says that it failed, with an error of its own;
- else, whose line breaks: it was killed;
- where all that is said is that communication timed out: who does not answer on the line (a stopped process), or answers that
  it is not waiting for anybody; failing that, who said so first;
- now and then all are asked where they are: who has left the training loop while others wait for it in a batch (`progress`).

All are told the verdict. It becomes a part of their own errors, and one that has not ended by itself a few seconds later is ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen
from types import CodeType
from typing import Any

import torch.distributed as dist

from lightning_piper import runtime
from lightning_piper.capture.reach import is_users
from lightning_piper.capture.source import shown_line
from lightning_piper.errors import PiperError
from lightning_piper.processes import agreement
from lightning_piper.processes.behind import AWAITED
from lightning_piper.processes.progress import Progress, parted
from lightning_piper.processes.world import RANK_ZERO, World
from lightning_piper.runtime.forks import in_forks

GRACE = 5.0  # seconds for a process to fail by itself, with a better message
SETTLE = 2.0  # seconds from the first word of a communication that failed until the verdict
PATIENCE = 5.0  # seconds for rank 0 to answer
EVERY = 5.0  # seconds, after which all are asked where they are
HERE = "127.0.0.1"  # where no name is known, either
LENGTH = 4  # bytes in which `Connection.send_bytes` puts the length of a short message before it
LONGEST = 2000  # characters of an error that are passed on; a message is then one write, whichever thread sends it

GONE = "it ended without a word (killed, or short of memory), or lost its connection"
SILENT = "it does not answer: the process is stopped, or its machine or network is gone"
WAITING_IN = tuple(str(Path(str(module.__file__)).parent) for module in (dist, runtime)) + (str(agreement.__file__),)

Message = dict[str, Any]


class FailureWatch:
    """Watches over one fit.

    Args:
        world: more than one process.
        host: address of rank 0; `HERE` if all processes are on its machine.
        children: that this process has started and has to end, by rank, from the next one on.
        progress: says how far this process has come; None: it does not train.

    Attributes:
        signalled: called, in a thread of its own, when another process says that a signal has come to it, with its rank.

    Making one is collective.

    Raises:
        PiperError: a process cannot reach rank 0.
    """

    def __init__(self, world: World, host: str, children: Sequence[Popen[Any]], progress: Callable[[], Progress | None]) -> None:
        self._world, self._progress = world, progress
        self._children = dict(enumerate(children, world.rank + 1))
        self._fitting = threading.get_ident()
        self._over, self._judged = threading.Event(), threading.Event()
        self._first: tuple[int, str] | None = None
        self.signalled: Callable[[int], object] = lambda rank: None
        server = _listen(host) if world.is_rank_zero else None
        port, token = world.broadcast(None if server is None else (server.getsockname()[1], secrets.token_hex()))  # type: ignore[misc]
        self._judging: threading.Thread | None = None
        if server is not None:
            self._judging = threading.Thread(target=_Judge(server, world.size, token).run, name="piper-failure-judge", daemon=True)
            self._judging.start()
        self._line = _connect(host if server is None else _own_address(server), port)
        _send(self._line, {"token": token, "rank": world.rank})
        self._thread = threading.Thread(target=self._listen, name="piper-failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The fit has ended on this process, well or not."""
        self._over.set()
        _send(self._line, {"over": True, "progress": self._progress()})
        if self._first is None:  # else rank 0 may be one that does not answer
            self._thread.join(PATIENCE)
        elif self._judging is not None:  # a rank 0 that is gone before all have heard the verdict looks like the one that failed
            self._judging.join(SETTLE)

    def pass_on(self) -> None:
        """Tell the others that a signal has come to this process."""
        _send(self._line, {"signalled": self._world.rank})

    def report(self, error: BaseException) -> None:
        """Tell the others that this process has failed; if another one did so before, say with the error who and why: of one that
        only says that the others are gone, before what it says, for not everything that shows an error shows its notes."""
        text = f"{type(error).__name__}: {error}{_line_of(error)}"[:LONGEST]
        rank = getattr(error, "rank", None)
        rank = self._world.rank if rank is None else rank
        _send(self._line, {"failed": text, "rank": rank, "waited": waited(error), "progress": self._progress()})
        if not self._judged.wait(PATIENCE):
            self._first = (RANK_ZERO, SILENT)
        assert self._first is not None
        first, why = self._first
        if why == text:
            return
        told = f"The first process to fail was rank {first}: {why}"
        if waited(error) and error.args == (str(error),):
            error.args = (f"{told}\n{error}",)
        else:
            error.add_note(told)

    def _listen(self) -> None:
        lead_left, lead = False, None
        while True:
            message = _receive(self._line)
            if message is None or "first" in message:
                break
            if "where" in message:
                _send(self._line, {**place_of(self._fitting), "progress": self._progress()})
            if "signalled" in message and message["signalled"] != self._world.rank:
                self.signalled(message["signalled"])
            if "left" in message:
                lead_left, lead = True, message["left"]
        self._line.close()
        if message is None and (lead_left or self._over.is_set()):
            if (found := parted({RANK_ZERO: lead, self._world.rank: self._progress()})) is not None:
                self._first = found
                self._judged.set()
            return
        self._first = (RANK_ZERO, GONE) if message is None else (message["first"], message["why"])
        self._judged.set()
        for rank in () if message is None else message["silent"]:
            if rank in self._children:
                self._children[rank].kill()
        first, why = self._first
        # Who has left the others would wait in vain; when it is gone, their waits break, and they fail by themselves.
        leaves = message is not None and message["parted"] and first == self._world.rank
        if not self._over.wait(0.0 if leaves else GRACE):
            said = f"rank {self._world.rank} ends, for it would wait in vain: the first process to fail was rank {first}: {why}"
            end(f"lightning_piper: {said}")


class _Judge:
    """Rank 0's end of all lines, its own included.

    Attributes:
        lines: that are open -> rank.
        strangers: who has connected and has not said who it is -> what has come of it so far.
        awaited: ranks that have not said so yet.
        ended: ranks whose fit is over.
        failed: what ranks said whose communication failed, in the order in which they did.
        places: where ranks are, of those that answered when they were asked last.
        progress: how far ranks have come, as they said last.
        verdict: as all are told.
    """

    def __init__(self, server: socket.socket, size: int, token: str) -> None:
        self._server, self._size, self._token = server, size, token
        self.lines: dict[Connection, int] = {}
        self.strangers: dict[socket.socket, bytes] = {}
        self.awaited = set(range(size))
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.places: dict[int, Message] = {}
        self.progress: dict[int, Progress | None] = {}
        self.verdict: Message | None = None
        self._until: float | None = None  # when the verdict is due; after it, when nobody is awaited any longer
        self._asks = time.monotonic() + EVERY  # when all are asked where they are
        self._before: dict[int, Message] = {}  # the places of the time before

    def run(self) -> None:
        # To the end of all lines, also after the verdict: a line that breaks would look like the end of rank 0.
        while self.awaited or self.lines:
            asking = self._until is None and self.verdict is None and not self.awaited
            due = self._asks if asking else self._until
            patience = None if due is None else max(0.0, due - time.monotonic())
            for ready in wait([*self.lines, *self.strangers, *([self._server] if self.awaited else [])], patience):
                if isinstance(ready, Connection):
                    self._heard(ready)
                elif ready is self._server:
                    with contextlib.suppress(OSError):  # whoever it was has gone again
                        self.strangers[in_forks(self._server.accept()[0], socket.socket.close)] = b""
                elif isinstance(ready, socket.socket):
                    self._greeting(ready)
            if self._until is not None and time.monotonic() >= self._until:
                if self.verdict is None:
                    self._judge(*self._of_waiting())
                else:
                    self.awaited, self._until = set(), None
            elif asking and time.monotonic() >= self._asks:
                self._look()
        for stranger in self.strangers:
            stranger.close()
        self._server.close()

    def _greeting(self, stranger: socket.socket) -> None:
        """Some bytes have come: of a rank, a message that begins with its length; of anybody else, anything. Nobody is waited for:
        of the rest of a message, what is there is taken, and no byte of the next message."""
        so_far = self.strangers.pop(stranger)
        try:
            found = stranger.recv(_lacking(so_far), socket.MSG_DONTWAIT)
            so_far += found
            if found and _lacking(so_far):
                self.strangers[stranger] = so_far
                return
            message = json.loads(so_far[LENGTH:])
            rank, known = message["rank"], secrets.compare_digest(str(message["token"]).encode(), self._token.encode())
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if known:
            self._greeted(_line(stranger), rank)
        else:
            stranger.close()  # of nobody in this run

    def _heard(self, line: Connection) -> None:
        rank, message = self.lines[line], _receive(line)
        if message is not None and "progress" in message:
            self.progress[rank] = message["progress"]
        if message is None:
            self._drop(line)
            if rank not in self.failed:
                self._judge(rank, GONE)
        elif "over" in message:
            self.ended.add(rank)
            if rank == RANK_ZERO:
                self._tell({"left": message["progress"]})
            self._drop(line)
        elif "signalled" in message:
            self._tell(message)
        elif "at" in message:
            self.places[rank] = message
        elif not message["waited"]:
            self._judge(message["rank"], message["failed"])
        else:
            self.failed.setdefault(rank, message["failed"])
            if self._until is None:
                self._until, self.places = time.monotonic() + SETTLE, {}
                self._tell({"where": True})

    def _greeted(self, line: Connection, rank: int) -> None:
        self.lines[line] = rank
        self.awaited.discard(rank)
        if RANK_ZERO in self.ended:
            _send(line, {"left": self.progress[RANK_ZERO]})
        if self.verdict is not None:
            _send(line, self.verdict)
        elif self._until is not None:
            _send(line, {"where": True})

    def _look(self) -> None:
        """Have processes parted that wait for each other? They are where they were the time before, and wait. Else ask again."""
        places, self._asks = self.places, time.monotonic() + EVERY
        waiting = all(rank in self.ended or (rank in places and places[rank]["waits"]) for rank in range(self._size))
        if waiting and places == self._before and (found := parted(self.progress)) is not None:
            self._judge(*found, parted=True)
            return
        self._before, self.places = places, {}
        self._tell({"where": True})

    def _judge(self, rank: int, why: str, parted: bool = False) -> None:
        """The first verdict stands.

        Args:
            parted: the rank has left others that wait for it.
        """
        if self.verdict is None:
            self.verdict = {"first": rank, "why": why, "silent": self._silent() if why == SILENT else [], "parted": parted}
            self._tell(self.verdict)
            self._until = time.monotonic() + GRACE

    def _of_waiting(self) -> tuple[int, str]:
        """The verdict where nothing has failed but communication."""
        if silent := self._silent():
            return silent[0], SILENT
        if (found := parted(self.progress)) is not None:
            return found
        if any(re.search(r"time(d )?out", text, re.IGNORECASE) for text in self.failed.values()):
            for rank, place in sorted(self.places.items()):
                if not place["waits"] and rank not in self.failed and rank not in self.ended:
                    return rank, f"it hangs, or takes longer than the timeout of communication: {place['at']}"
        return next(iter(self.failed.items()))

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in {*self.places, *self.failed, *self.ended}]

    def _tell(self, message: Message) -> None:
        """All, and last of all rank 0, which may end when it has heard."""
        for line, _ in sorted(self.lines.items(), key=lambda each: each[1] == RANK_ZERO):
            _send(line, message)

    def _drop(self, line: Connection) -> None:
        del self.lines[line]
        line.close()


def end(said: str) -> None:
    """This process, whatever becomes of what it says: stderr may be closed, or a pipe that nobody reads."""
    saying = threading.Thread(target=lambda: print(said, file=sys.stderr, flush=True), daemon=True)
    saying.start()
    saying.join(GRACE)
    os._exit(1)


# Where a process is


def waited(error: BaseException) -> bool:
    """Did a communication fail, and nothing else? Then another process failed before."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and not isinstance(error, PiperError) and bool(frames) and _waits(frames[-1].f_code)


def place_of(thread: int) -> Message:
    """What a thread is doing, or the one that it waits for."""
    thread = AWAITED.get(thread, thread)
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"waits": False, "at": "its thread has ended"}
    code = frame.f_code
    return {"waits": _waits(code), "at": f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"}


def _waits(code: CodeType) -> bool:
    """Functions in which a thread stands only while it communicates."""
    return code.co_filename.startswith(WAITING_IN)


# Lines


def _listen(host: str) -> socket.socket:
    """On the address by which the others know this machine, alone; on all of them where that is none of its own: what a name or an
    address stands for may be known to the network only, and a machine may know its own name as that of loopback."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if host == HERE or not ipaddress.ip_address(address[0]).is_loopback:
                return in_forks(socket.create_server(address[:2], family=family), socket.socket.close)
    if socket.has_dualstack_ipv6():
        return in_forks(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True), socket.socket.close)
    return in_forks(socket.create_server(("", 0)), socket.socket.close)


def _own_address(server: socket.socket) -> str:
    """By which this process reaches its own server, without asking for a name."""
    address: str = server.getsockname()[0]
    return HERE if address in ("::", "0.0.0.0") else address


def _lacking(greeting: bytes) -> int:
    """How many bytes are to come, of its length or of the rest of it.

    Raises:
        ValueError: no rank greets at such length.
    """
    if len(greeting) < LENGTH:
        return LENGTH - len(greeting)
    length = int.from_bytes(greeting[:LENGTH], "big")
    if not 0 < length <= LONGEST:
        raise ValueError("not a greeting")
    return LENGTH + length - len(greeting)


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
    return in_forks(Connection(connected.detach()), Connection.close)


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


def _line_of(error: BaseException) -> str:
    """Where in the user's steps, hooks or callbacks an error was raised, for those who do not have its traceback."""
    line, called = "", False
    for frame, number in traceback.walk_tb(None if isinstance(error, PiperError) else error.__traceback__):
        if not is_users(frame.f_code):
            called = True  # from here on it is Lightning that calls the user's code
        elif called:
            line = f", at {shown_line(frame.f_code.co_filename, number)}"
    return line
