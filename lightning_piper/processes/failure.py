"""When one process fails, all processes end soon and report which process failed first and why.

A process that exits closes its connections, and its peers notice immediately. They see only that a peer is gone,
and this peer may itself have ended because of a third process. A process that failed may continue to run (its
script caught the error) or hang, and gloo cannot abort an operation in which other processes wait. So every
process keeps a connection to rank 0, where one thread decides which process failed first:

- A process that reports an error of its own failed first.
- Otherwise, a process failed first if its connection breaks, because it was killed, or if its machine does not answer
  for some seconds (`reachability`).
- If processes report only that a communication failed, rank 0 asks all processes where they are. A process
  that does not answer failed first (it is stopped). If all answer, a process that has left the training loop
  failed first. Otherwise, after a timeout, a process that is not waiting for any process failed first. If
  there is no such process, the process that reported first failed first.
- Every few seconds, rank 0 asks all processes where they are. This detects a process that left the training
  loop while another process waits for it in a batch (`progress`). It also detects a process that waits in a
  call that all processes must make (`MEETING`), while all other processes wait for something else.

Rank 0 sends the verdict to all processes. Each process adds the verdict to its own error. The watch ends a
process that has not ended by itself a few seconds later.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen
from types import CodeType
from typing import Any

import torch.distributed as dist

from lightning_piper import runtime
from lightning_piper.capture.python_state.name_scan import is_users
from lightning_piper.common.user_lines import shown_line
from lightning_piper.errors import PiperError
from lightning_piper.processes import agreement, spares
from lightning_piper.processes.background import AWAITED, MEETING
from lightning_piper.processes.progress import Progress, parted
from lightning_piper.processes.reachability import LOST, OFTEN, is_lost, keep_asking
from lightning_piper.processes.world import RANK_ZERO, World
from lightning_piper.runtime.connections import break_connections
from lightning_piper.runtime.same_machine.forks import in_forks

GRACE = 5.0  # seconds after the verdict in which a process may end by itself, before the watch ends it
SETTLE = 2.0  # seconds from the first report of a failed communication to the verdict
PATIENCE = 5.0  # seconds that a process waits for rank 0's answer
EVERY = 5.0  # seconds between two requests for the places of all processes
ALONE = 60.0  # seconds in which all processes wait at the same places, until a call that only some made is an error
HERE = "127.0.0.1"  # rank 0's address if all processes are on one machine: it needs no host name
LENGTH = 4  # bytes of the length prefix that `Connection.send_bytes` puts before a short message
LONGEST = 2000  # characters of an error that are sent; a message is then one write, whichever thread sends it

GONE = "it ended without an error message (killed, or out of memory), or lost its connection"
UNREACHABLE = f"its machine has not answered for {LOST:g} seconds: the machine or the network has failed"
SILENT = "it does not answer: the process is stopped, or its machine or network is gone"
# Paths of the code in which a thread is only while it communicates.
WAITING_IN = tuple(str(Path(str(module.__file__)).parent) for module in (dist, runtime)) + (
    str(agreement.__file__),
    str(spares.__file__),
)

Message = dict[str, Any]


class FailureWatch:
    """A watch over the processes of one fit. Making one is collective.

    Args:
        world: The processes; more than one.
        host: Address of rank 0; `HERE` if all processes are on rank 0's machine.
        children: The processes that this process started and must end, in the order of their ranks, which
            start at the next rank.
        progress: Returns how far this process has come; None if it does not train.

    Attributes:
        signaled: Called with a rank, in the watch's thread, when this rank reports that it received a
            signal.
        replaces: Seconds that the watch waits for the end of the fit if a process is lost, because a spare may replace
            this process; None if no spare can replace a process.

    Raises:
        PiperError: A process cannot reach rank 0.
    """

    def __init__(
        self, world: World, host: str, children: Sequence[Popen[Any]], progress: Callable[[], Progress | None]
    ) -> None:
        self._world, self._progress = world, progress
        self._children = dict(enumerate(children, world.rank + 1))
        self._fitting = threading.get_ident()  # the thread whose place this process reports
        # set when the fit has ended on this process, and when there is a verdict
        self._over, self._judged = threading.Event(), threading.Event()
        self._first: tuple[int, str] | None = None  # the verdict: the first process to fail, and why
        self.signaled: Callable[[int], object] = lambda rank: None
        self.replaces: float | None = None
        self._reported: BaseException | None = None
        server = _listen(host) if world.is_rank_zero else None
        port, token = world.broadcast(
            None if server is None else (server.getsockname()[1], secrets.token_hex())
        )  # type: ignore[misc]
        self._judging: threading.Thread | None = None
        if server is not None:
            self._judging = threading.Thread(
                target=_Judge(server, world.size, token, self._children).run,
                name="piper-failure-judge",
                daemon=True,
            )
            self._judging.start()
        self._line = _connect(host if server is None else _own_address(server), port)
        _send(self._line, {"token": token, "rank": world.rank})
        self._thread = threading.Thread(target=self._listen, name="piper-failure-watch", daemon=True)
        self._thread.start()

    @property
    def judged(self) -> bool:
        """Whether a process has failed."""
        return self._judged.is_set()

    @property
    def lost(self) -> int | None:
        """The first process to fail, if it was killed or its machine failed; None otherwise."""
        return self._first[0] if self._first is not None and self._first[1] in (GONE, UNREACHABLE) else None

    def stop(self) -> None:
        """Report that the fit has ended on this process, with or without an error."""
        self._over.set()
        _send(self._line, {"over": True, "progress": self._progress()})
        # Without a verdict, rank 0 is alive. With a verdict, rank 0 may be the process that does not answer.
        if self._first is None:
            self._thread.join(PATIENCE)
        elif self._judging is not None:
            # if rank 0 exited before all processes received the verdict, they would blame rank 0
            self._judging.join(SETTLE)

    def pass_on(self) -> None:
        """Report to the other processes that this process received a signal."""
        _send(self._line, {"signaled": self._world.rank})

    def report(self, error: BaseException) -> bool:
        """Report to the other processes that this process has failed, and wait for the verdict.

        If another process failed first, this method adds the verdict to the error. If the error only says
        that communication failed, the verdict goes before the error's message, because some tools that
        display an error omit its notes. Otherwise the verdict becomes a note.

        Returns:
            Whether this process failed first.
        """
        if error is self._reported:
            return self._first is not None and self._first[0] == self._world.rank
        self._reported = error
        text = f"{type(error).__name__}: {error}{_line_of(error)}"[:LONGEST]
        rank = getattr(error, "rank", None)
        rank = self._world.rank if rank is None else rank
        _send(
            self._line, {"failed": text, "rank": rank, "waited": waited(error), "progress": self._progress()}
        )
        if not self._judged.wait(PATIENCE):
            self._first = (RANK_ZERO, SILENT)
        assert self._first is not None
        first, why = self._first
        if why != text:
            told = f"The first process to fail was rank {first}: {why}"
            if waited(error) and error.args == (str(error),):
                error.args = (f"{told}\n{error}",)
            else:
                error.add_note(told)
        return first == self._world.rank

    def _listen(self) -> None:
        """Read rank 0's messages, in the watch's thread, until there is a verdict or the connection ends.
        After a verdict, end the children that did not answer, and this process if it does not end in time.

        If the connection ends without a verdict, and no fit is over, the verdict is that rank 0 failed first.
        """
        lead_left, lead = False, None  # whether rank 0's fit is over, and its progress
        while True:
            message = self._next()
            if message is None or "first" in message:
                break
            if "where" in message:
                _send(self._line, {**place_of(self._fitting), "progress": self._progress()})
            if "signaled" in message and message["signaled"] != self._world.rank:
                self.signaled(message["signaled"])
            if "left" in message:
                lead_left, lead = True, message["left"]
        self._line.close()
        # The connection has ended because a fit is over. There is a verdict only if this process waits for a
        # rank 0 that has left the training loop.
        if message is None and (lead_left or self._over.is_set()):
            if (found := parted({RANK_ZERO: lead, self._world.rank: self._progress()})) is not None:
                self._first = found
                self._judged.set()
            return
        self._first = (RANK_ZERO, GONE) if message is None else (message["first"], message["why"])
        self._judged.set()
        replaces = self.lost is not None and self.replaces is not None
        # Nothing else ends the waits for messages of a lost machine, or of a process that waits for a spare.
        if self._first[1] == UNREACHABLE or replaces:
            break_connections()
        for rank in () if message is None else message["silent"]:
            if rank in self._children:
                self._children[rank].kill()
        first, why = self._first
        # The process that left the loop would wait forever for its peers. After it has ended, the waits of
        # its peers break, and the peers fail by themselves.
        leaves = message is not None and message["parted"] and first == self._world.rank
        if not self._over.wait(0.0 if leaves else self.replaces if replaces else GRACE):
            said = (
                f"rank {self._world.rank} ends, because it would wait forever: the first process to fail "
                f"was rank {first}: {why}"
            )
            end(f"lightning_piper: {said}")

    def _next(self) -> Message | None:
        """Return rank 0's next message, or the verdict that its machine is lost; None if the connection has
        ended."""
        while not self._line.poll(OFTEN):
            if is_lost(self._line.fileno()):
                return {"first": RANK_ZERO, "why": UNREACHABLE, "silent": [], "parted": False}
        return _receive(self._line)


class _Judge:
    """The judge of a run, which decides in a thread of rank 0 (`run`) which process failed first. It holds
    rank 0's end of the connection of each process, including rank 0 itself.

    Args:
        server: The socket to which the processes connect.
        size: Number of processes.
        token: Secret text by which the processes of this run identify themselves.
        children: Rank -> process that rank 0 has started.

    Attributes:
        lines: Open connection -> rank.
        strangers: Connected socket that has not identified itself -> the bytes received from it so far.
        awaited: Ranks that have not connected yet.
        ended: Ranks whose fit is over.
        failed: Rank whose communication failed -> its report, in the order of the reports.
        places: Rank that answered the last request -> its answer, as `place_of` returns it.
        progress: Rank -> how far it has come, by its last message; None if it does not train.
        verdict: The message with the verdict; None before there is a verdict.
    """

    def __init__(
        self, server: socket.socket, size: int, token: str, children: Mapping[int, Popen[Any]]
    ) -> None:
        self._server, self._size, self._token, self._children = server, size, token, children
        self.lines: dict[Connection, int] = {}
        self.strangers: dict[socket.socket, bytes] = {}
        self.awaited = set(range(size))
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.places: dict[int, Message] = {}
        self.progress: dict[int, Progress | None] = {}
        self.verdict: Message | None = None
        # When the verdict is due; after the verdict, when the wait for late ranks ends. None: neither is set.
        self._until: float | None = None
        self._asks = time.monotonic() + EVERY  # when to ask all processes where they are
        self._before: dict[int, Message] = {}  # the places of the previous request
        self._since = time.monotonic()  # since when all processes wait at these places

    def run(self) -> None:
        """Receive the messages of all processes, and send a verdict once it is due."""
        # The loop runs until all connections end, even after the verdict: if it closed a connection, the peer
        # would conclude that rank 0 has ended.
        while self.awaited or self.lines:
            asking = self._until is None and self.verdict is None and not self.awaited
            due = self._asks if asking else self._until
            patience = OFTEN if due is None else min(OFTEN, max(0.0, due - time.monotonic()))
            for ready in wait(
                [*self.lines, *self.strangers, *([self._server] if self.awaited else [])], patience
            ):
                if isinstance(ready, Connection):
                    self._heard(ready)
                elif ready is self._server:
                    with contextlib.suppress(OSError):  # the peer has already disconnected
                        self.strangers[in_forks(self._server.accept()[0], socket.socket.close)] = b""
                elif isinstance(ready, socket.socket):
                    self._greeting(ready)
            for rank in self.awaited & self._children.keys():
                if self._children[rank].poll() is not None:
                    self._judge(rank, GONE)
            for line, rank in [*self.lines.items()]:
                if is_lost(line.fileno()):
                    self._drop(line)
                    self._judge(rank, UNREACHABLE)
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
        """Read the bytes of an unidentified peer without waiting for more.

        A rank sends a message that begins with its length; any other peer may send anything. The method reads
        at most the missing part of the first message, and no byte of the next message. It closes the
        connection of a peer that does not belong to this run.
        """
        so_far = self.strangers.pop(stranger)
        try:
            found = stranger.recv(_lacking(so_far), socket.MSG_DONTWAIT)
            so_far += found
            if found and _lacking(so_far):
                self.strangers[stranger] = so_far
                return
            message = json.loads(so_far[LENGTH:])
            rank = message["rank"]
            known = secrets.compare_digest(str(message["token"]).encode(), self._token.encode())
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if known:
            self._greeted(_line(stranger), rank)
        else:
            stranger.close()  # the peer does not belong to this run

    def _heard(self, line: Connection) -> None:
        """Handle a message of a process, or the end of its connection.

        A report of a failed communication gives the other processes `SETTLE` seconds to report the cause. Any
        other failure is the verdict.
        """
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
        elif "signaled" in message:
            self._tell(message)
        elif "at" in message:
            self.places[rank] = message
        elif not message["waited"]:  # the process reports an error of its own
            self._judge(message["rank"], message["failed"])
        else:  # the process reports that a communication failed
            self.failed.setdefault(rank, message["failed"])
            if self._until is None:
                self._until, self.places = time.monotonic() + SETTLE, {}
                self._tell({"where": True})

    def _greeted(self, line: Connection, rank: int) -> None:
        """Register the connection of a rank that has identified itself, and send what the rank has missed."""
        self.lines[line] = rank
        self.awaited.discard(rank)
        if RANK_ZERO in self.ended:
            _send(line, {"left": self.progress[RANK_ZERO]})
        if self.verdict is not None:
            _send(line, self.verdict)
        elif self._until is not None:
            _send(line, {"where": True})

    def _look(self) -> None:
        """Send a verdict if processes that wait for each other can no longer meet. Otherwise ask for their
        places again.

        Processes can no longer meet if one of them has left the training loop (`parted`), and all of them
        wait at the same places as at the previous request.
        """
        places, self._asks = self.places, time.monotonic() + EVERY
        waiting = all(
            rank in self.ended or (rank in places and places[rank]["waits"]) for rank in range(self._size)
        )
        if waiting and places == self._before:
            found = parted(self.progress)
            if found is None and time.monotonic() - self._since >= ALONE:
                found = self._unmet(places)
            if found is not None:
                self._judge(*found, parted=True)
                return
        else:
            self._since = time.monotonic()
        self._before, self.places = places, {}
        self._tell({"where": True})

    def _unmet(self, places: Mapping[int, Message]) -> tuple[int, str] | None:
        """Return a rank that waits in a call that another rank has not made, and the explanation; None if there
        is no such rank."""
        meeting = {rank: call for rank, place in sorted(places.items()) if (call := place.get("meeting"))}
        others = [rank for rank in range(self._size) if rank not in meeting]
        if not meeting or not others:
            return None
        rank, call = next(iter(meeting.items()))
        return rank, (
            f"it waits in {call}, which all ranks must call, but rank {others[0]} waits for something else. Call "
            "it on all ranks. If you use `with`, write `if self.global_rank == 0` inside of its block [PIPER-S007]"
        )

    def _judge(self, rank: int, why: str, parted: bool = False) -> None:
        """Send the verdict, unless a verdict was sent before.

        Args:
            rank: The rank that failed first.
            why: The error or the reason, for all processes' errors.
            parted: Whether the rank has left processes that wait for it.
        """
        if self.verdict is None:
            self.verdict = {
                "first": rank,
                "why": why,
                "silent": self._silent() if why == SILENT else [],
                "parted": parted,
            }
            self._tell(self.verdict)
            self._until = time.monotonic() + GRACE

    def _of_waiting(self) -> tuple[int, str]:
        """Return the rank that failed first and the reason, when all reports say only that a communication
        failed. The module's docstring gives the order of the cases."""
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
        """Return the ranks that neither answered the last request, nor failed, nor have ended their fit."""
        return [rank for rank in range(self._size) if rank not in {*self.places, *self.failed, *self.ended}]

    def _tell(self, message: Message) -> None:
        """Send a message to all processes, to rank 0 last, because rank 0 may end as soon as it receives the
        message."""
        for line, _ in sorted(self.lines.items(), key=lambda each: each[1] == RANK_ZERO):
            _send(line, message)

    def _drop(self, line: Connection) -> None:
        del self.lines[line]
        line.close()


def end(said: str) -> None:
    """End this process after printing a message to stderr.

    Waits at most `GRACE` seconds for the output: stderr may be closed, or a pipe that no process reads.
    """
    saying = threading.Thread(target=lambda: print(said, file=sys.stderr, flush=True), daemon=True)
    saying.start()
    saying.join(GRACE)
    os._exit(1)


# Where a process is


def waited(error: BaseException) -> bool:
    """Return whether an error says only that a communication failed. If so, another process failed before."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, PiperError)
        and bool(frames)
        and _waits(frames[-1].f_code)
    )


def place_of(thread: int) -> Message:
    """Return where a thread is. If it waits for another thread (`AWAITED`), return where that thread is.

    The result has the line of code ("at"), whether this code only communicates ("waits"), and the call that all
    processes must make, if the thread waits in one ("meeting").
    """
    meeting = MEETING.get(thread)
    thread = AWAITED.get(thread, thread)
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"waits": False, "at": "its thread has ended"}
    code = frame.f_code
    at = f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
    place = {"waits": _waits(code), "at": at}
    return place if meeting is None else {**place, "meeting": meeting}


def _waits(code: CodeType) -> bool:
    """Return whether this is the code of a function in which a thread is only while it communicates."""
    return code.co_filename.startswith(WAITING_IN)


# Connections


def _listen(host: str) -> socket.socket:
    """Open rank 0's server socket.

    The socket listens only on the address by which the other processes reach this machine. If that address
    cannot be bound here or is a loopback address, the socket listens on all addresses. The reasons are that a
    name may resolve only through the network, and that a machine may resolve its own name to loopback.
    """
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if host == HERE or not ipaddress.ip_address(address[0]).is_loopback:
                return in_forks(socket.create_server(address[:2], family=family), socket.socket.close)
    if socket.has_dualstack_ipv6():
        return in_forks(
            socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True), socket.socket.close
        )
    return in_forks(socket.create_server(("", 0)), socket.socket.close)


def _own_address(server: socket.socket) -> str:
    """Return the address by which this process reaches its own server, without a name lookup."""
    address: str = server.getsockname()[0]
    return HERE if address in ("::", "0.0.0.0") else address


def _lacking(greeting: bytes) -> int:
    """Return how many bytes of a first message are missing: of its length prefix, or of its content.

    Raises:
        ValueError: The message is empty or longer than `LONGEST`, so the peer is not a rank.
    """
    if len(greeting) < LENGTH:
        return LENGTH - len(greeting)
    length = int.from_bytes(greeting[:LENGTH], "big")
    if not 0 < length <= LONGEST:
        raise ValueError("not a greeting")
    return LENGTH + length - len(greeting)


def _connect(host: str, port: int) -> Connection:
    """Connect to rank 0.

    Raises:
        PiperError: This process cannot reach rank 0.
    """
    try:
        return _line(socket.create_connection((host, port), PATIENCE))
    except OSError as error:
        advice = (
            "Look for the error of rank 0, which runs on this machine"
            if host == HERE
            else "Look for an error of rank 0. If it has none, let the processes reach each other on all ports"
        )
        raise PiperError(
            f"PiperStrategy: this process cannot reach port {port} of rank 0 at {host} ({error}). {advice} "
            "[PIPER-L002]"
        ) from error


def _line(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    keep_asking(connected)
    return in_forks(Connection(connected.detach()), Connection.close)


def _send(line: Connection, message: Message) -> None:
    """Send a message. A peer that is gone is ignored here, because the receiving thread notices it."""
    with contextlib.suppress(OSError, ValueError):
        line.send_bytes(json.dumps(message).encode())


def _receive(line: Connection) -> Message | None:
    """Receive a message; None if the connection is broken, or if the bytes are not a message."""
    try:
        message = json.loads(line.recv_bytes(16 * LONGEST))
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _line_of(error: BaseException) -> str:
    """Return the line of the user's steps, hooks or callbacks in which an error was raised, because other
    processes do not have its traceback. The result is empty if the user's code did not raise it."""
    line, called = "", False
    for frame, number in traceback.walk_tb(None if isinstance(error, PiperError) else error.__traceback__):
        if not is_users(frame.f_code):
            called = True  # from this frame on, Lightning calls the user's code
        elif called:
            line = f", at {shown_line(frame.f_code.co_filename, number)}"
    return line
