"""Which rank the judge names as the one that failed first, given the messages that rank 0 receives. Runs
without other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_piper.errors import ExecutionError
from lightning_piper.processes import failure
from lightning_piper.processes.failure import (
    GONE,
    HERE,
    SILENT,
    UNREACHABLE,
    FailureWatch,
    _connect,
    _Judge,
    _listen,
    _own_address,
    _receive,
    _send,
    place_of,
    waited,
)
from lightning_piper.processes.progress import Progress, parted, progress

PATIENCE = 300.0  # seconds, longer than any machine needs for what these tests wait for
TOKEN = "token of this run"
TIMED_OUT = "ExecutionError: device 0: recv failed: Timed out waiting 6000ms for recv operation to complete"
CLOSED = "ExecutionError: device 0: recv failed: Connection closed by peer"


class Ranks:
    """Three ranks with their connections, and the judge."""

    def __init__(self) -> None:
        server = _listen(HERE)
        self.port = server.getsockname()[1]
        self.children: dict[int, Any] = {}
        self.judge = _Judge(server, 3, TOKEN, self.children)
        self.thread = threading.Thread(target=self.judge.run, daemon=True)
        self.thread.start()
        self.lines: dict[int, Connection] = {}

    def connect(self, *ranks: int) -> None:
        for rank in ranks:
            self.lines[rank] = _connect(HERE, self.port)
            _send(self.lines[rank], {"token": TOKEN, "rank": rank})

    def wait_for(self, *ranks: int) -> None:
        """Return as soon as the judge has the connections of these ranks."""
        end = time.monotonic() + PATIENCE
        while not {*ranks} <= {*tuple(self.judge.lines.values())}:
            assert time.monotonic() < end

    def failed(self, rank: int, why: str, waited: bool = True, progress: Progress | None = None) -> None:
        _send(self.lines[rank], {"failed": why, "rank": rank, "waited": waited, "progress": progress})

    def hear(self, rank: int) -> dict[str, Any]:
        assert self.lines[rank].poll(PATIENCE)
        message = _receive(self.lines[rank])
        assert message is not None
        return message

    def answer(self, rank: int, waits: bool) -> None:
        assert self.hear(rank) == {"where": True}
        _send(self.lines[rank], {"waits": waits, "at": f"place of {rank}"})

    def settle(self, *heard: int) -> None:
        """End the time in which the judge waits for more messages, as soon as it has those of the given
        ranks, of which at least one must have answered where it is.
        """
        while not all(rank in self.judge.places or rank in self.judge.failed for rank in heard):
            pass
        self.judge._until = 0.0
        rank, answer = next(iter(self.judge.places.items()))
        _send(self.lines[rank], answer)  # sent again, so that the judge looks at the clock

    def verdict(self, rank: int) -> tuple[int, str]:
        while "first" not in (message := self.hear(rank)):
            pass
        return message["first"], message["why"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(failure, "GRACE", PATIENCE)
    monkeypatch.setattr(failure, "SETTLE", PATIENCE)
    made = Ranks()
    yield made
    for line in made.lines.values():
        line.close()
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()


def test_an_error_of_its_own_counts_at_once(ranks):
    ranks.connect(0, 1, 2)
    ranks.failed(2, "ValueError: x", waited=False)
    assert [ranks.verdict(rank) for rank in range(3)] == [(2, "ValueError: x")] * 3


def test_the_one_whose_line_breaks_comes_before_those_who_noticed(ranks):
    ranks.connect(0, 1, 2)
    ranks.failed(0, CLOSED)
    ranks.hear(0)  # the judge has it
    ranks.lines.pop(2).close()
    assert ranks.verdict(0) == ranks.verdict(1) == (2, GONE)


def test_a_child_that_ends_before_it_connects_is_gone(ranks):
    ranks.connect(0, 1)
    ranks.children[2] = mock.Mock(poll=lambda: -9)
    assert ranks.verdict(0) == ranks.verdict(1) == (2, GONE)
    ranks.connect(2)  # so that the judge ends


def test_the_one_whose_machine_does_not_answer_comes_before_those_who_noticed(ranks, monkeypatch):
    ranks.connect(0, 1, 2)
    ranks.failed(0, CLOSED)
    ranks.hear(0)  # the judge has it
    ranks.wait_for(2)
    (lost,) = (line.fileno() for line, rank in ranks.judge.lines.items() if rank == 2)
    monkeypatch.setattr(failure, "is_lost", lambda file: file == lost)
    assert ranks.verdict(0) == ranks.verdict(1) == (2, UNREACHABLE)


def test_the_one_who_waits_for_nobody_hangs(ranks):
    ranks.connect(0, 1, 2)
    ranks.failed(1, CLOSED)  # by rank 0, whose time was over, and who says so later
    ranks.failed(0, TIMED_OUT)
    ranks.answer(1, waits=True)
    ranks.answer(2, waits=False)
    ranks.settle(0, 1, 2)
    assert ranks.verdict(0) == (2, "it hangs, or takes longer than the timeout of communication: place of 2")


def test_without_a_timeout_nobody_hangs(ranks):
    ranks.connect(0, 1, 2)
    ranks.failed(1, CLOSED)
    ranks.answer(0, waits=False)
    ranks.answer(2, waits=True)
    ranks.settle(0, 1, 2)
    assert ranks.verdict(0) == (1, CLOSED)


def test_who_does_not_answer_is_stopped(ranks):
    ranks.connect(0, 1, 2)
    ranks.failed(1, TIMED_OUT)
    ranks.answer(0, waits=False)
    ranks.settle(0, 1)
    assert ranks.verdict(0) == (2, SILENT)


def test_who_has_ended_well_is_not_blamed(ranks):
    ranks.connect(0, 1, 2)
    _send(ranks.lines[0], {"over": True, "progress": None})
    assert ranks.hear(1) == ranks.hear(2) == {"left": None}
    ranks.lines.pop(0).close()
    ranks.failed(1, CLOSED)
    ranks.answer(2, waits=True)
    ranks.settle(1, 2)
    assert ranks.verdict(2) == (1, CLOSED)


def test_one_who_comes_after_the_verdict_hears_it(ranks):
    ranks.connect(0, 1)
    ranks.failed(1, "ValueError: x", waited=False)
    assert ranks.verdict(0) == (1, "ValueError: x")
    ranks.connect(2)
    assert ranks.verdict(2) == (1, "ValueError: x")


STRANGE = [
    json.dumps({"token": "", "rank": 0}).encode(),
    json.dumps({"token": "Schlüssel", "rank": 0}).encode(),
    json.dumps({"rank": 0}).encode(),
    b"[1]",
    b"7",
    b"\xff\xfe",
]


@pytest.mark.parametrize(
    "said",
    [
        *(len(each).to_bytes(4, "big") + each for each in STRANGE),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4),
        b"\xff\xff\xff\xff" + bytes(8),
    ],
)
def test_strangers_are_not_heard(ranks, said):
    stranger = socket.create_connection((HERE, ranks.port), PATIENCE)
    stranger.sendall(said)
    with contextlib.suppress(ConnectionError):  # it was left before all was read
        assert stranger.recv(1) == b""
    _connect(HERE, ranks.port).close()
    ranks.connect(0, 1, 2)
    ranks.failed(0, "ValueError: x", waited=False)
    assert ranks.verdict(2) == (0, "ValueError: x")


def test_nobody_is_kept_waiting_by_one_who_does_not_finish(ranks):
    silent, slow = (socket.create_connection((HERE, ranks.port), PATIENCE) for _ in range(2))
    greeting = json.dumps({"token": TOKEN, "rank": 1}).encode()
    sent = len(greeting).to_bytes(4, "big") + greeting
    slow.sendall(sent[:2])
    ranks.connect(0, 2)
    ranks.lines[1] = Connection(slow.detach())
    for i in range(2, len(sent)):
        os.write(ranks.lines[1].fileno(), sent[i : i + 1])
    ranks.failed(1, "ValueError: x", waited=False)
    assert [ranks.verdict(rank) for rank in range(3)] == [(1, "ValueError: x")] * 3
    silent.close()


def test_it_listens_where_it_has_to_alone():
    with _listen(HERE) as server:
        assert server.getsockname()[0] == HERE and _own_address(server) == HERE
    with _listen("name.invalid") as server:  # it may be known elsewhere
        assert server.getsockname()[0] in ("::", "0.0.0.0") and _own_address(server) == HERE
    with _listen(
        "localhost"
    ) as server:  # as a machine may call itself, to which others come over the network
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def look(
    judge: _Judge, *progress: Progress | None, waits: bool = True, at: str = "a collective"
) -> int | None:
    """Let all ranks say where they are, and let the judge look once. Returns the rank that it names, or None."""
    judge.places = {rank: {"waits": waits, "at": at, "progress": each} for rank, each in enumerate(progress)}
    judge.progress = dict(enumerate(progress))
    judge._look()
    return None if judge.verdict is None else judge.verdict["first"]


@pytest.fixture
def judge() -> Iterator[_Judge]:
    server = _listen(HERE)
    yield _Judge(server, 2, TOKEN, {})
    server.close()


LEFT, GOING_ON = progress(6, 2, 3, "its data had ended"), progress(6, 2, 3)


def test_who_has_left_the_others_is_judged_when_all_have_waited_for_some_time(judge):
    assert look(judge, GOING_ON, LEFT) is None
    assert look(judge, GOING_ON, LEFT) == 1
    assert judge.verdict == {
        "first": 1,
        "why": parted({0: GOING_ON, 1: LEFT})[1],
        "silent": [],
        "parted": True,
    }
    assert (
        "it has left the training loop after 6 batches (3 in its last epoch), because its data had ended, "
        "while rank 0" in (judge.verdict["why"])
    )


def test_one_who_is_only_late_has_not_been_left(judge):
    for _ in range(2):
        assert look(judge, progress(5, 2, 2), LEFT) is None  # in the last batch
        assert (
            look(judge, GOING_ON, LEFT, waits=False) is None
        )  # drawing one more than there is, as far as anybody knows
        assert look(judge, LEFT, LEFT) is None
        assert look(judge, progress(6, 3, 0), LEFT) is None  # ahead, in the next epoch
        assert look(judge, progress(6, 3, 0), progress(6, 3, 0)) is None
        assert look(judge, None, LEFT) is None
    assert look(judge, GOING_ON, LEFT, at="one place") is None
    assert look(judge, GOING_ON, LEFT, at="another") is None


def test_who_goes_on_after_the_fit_of_another_has_been_left(judge):
    ended = progress(6, 2, 3, "its trainer.should_stop was set", over=True)
    assert look(judge, progress(6, 3, 0), ended) is None
    assert look(judge, progress(6, 3, 0), ended) == 1


def test_who_waits_for_all_in_a_call_that_others_have_not_made(judge, monkeypatch):
    def look_once(*meeting: str | None, at: str = "a collective") -> Any:
        judge.places = {rank: {"waits": True, "at": at, "meeting": call} for rank, call in enumerate(meeting)}
        judge._look()
        return None if judge.verdict is None else judge.verdict["why"]

    call = "piper.whole_module at here.py:3"
    assert all(look_once(None, call) is None for _ in range(3))  # others may still come
    monkeypatch.setattr(failure, "ALONE", 0.0)
    assert all(look_once(call, call) is None for _ in range(3))
    assert all(look_once(None, None) is None for _ in range(3))
    assert look_once(None, call, at="another place") is None
    assert (
        look_once(None, call, at="another place")
        == f"it waits in {call}, which all ranks must call, but rank 0 "
        "waits for something else. Call it on all ranks. If you use `with`, write `if self.global_rank == 0` inside of "
        "its block [PIPER-S007]"
    )


def test_who_has_ended_and_left_the_others_is_named_when_their_communication_breaks(ranks):
    ranks.connect(0, 1, 2)
    _send(ranks.lines[1], {"over": True, "progress": LEFT})
    for rank in (0, 2):
        ranks.failed(rank, CLOSED, progress=GOING_ON)
    while not {0, 2} <= {*ranks.judge.failed}:
        pass
    ranks.judge._until = 0.0
    ranks.failed(0, CLOSED, progress=GOING_ON)  # once more: it looks at the clock
    assert ranks.verdict(2) == (1, parted({0: GOING_ON, 1: LEFT})[1])


class Lead:
    """The world of rank 0 of two."""

    rank, size, is_rank_zero = 0, 2, True

    def broadcast(self, value: Any) -> Any:
        self.port, self.token = value
        return value


def test_the_lead_stays_until_all_have_heard(monkeypatch):
    monkeypatch.setattr(failure, "SETTLE", PATIENCE)
    world = Lead()
    watch = FailureWatch(world, HERE, [], lambda: None)  # type: ignore[arg-type]
    other = _connect(HERE, world.port)
    _send(other, {"token": world.token, "rank": 1})
    watch.report(ValueError("of its own"))
    leaving = threading.Thread(target=watch.stop)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    assert other.poll(PATIENCE)
    assert _receive(other) == {"first": 0, "why": "ValueError: of its own", "silent": [], "parted": False}
    other.close()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()


def test_a_lead_whose_machine_does_not_answer_has_failed_first(monkeypatch):
    server = _listen(HERE)
    broken = threading.Event()
    monkeypatch.setattr(failure, "break_connections", broken.set)
    world = SimpleNamespace(
        rank=1, is_rank_zero=False, broadcast=lambda value: (server.getsockname()[1], TOKEN)
    )
    watch = FailureWatch(world, HERE, [], lambda: None)  # type: ignore[arg-type]
    line, _ = server.accept()
    assert not watch._judged.is_set()  # the negative control
    monkeypatch.setattr(failure, "is_lost", lambda file: True)
    assert broken.wait(PATIENCE)
    error = RuntimeError("connection closed")
    assert not watch.report(error)
    assert f"The first process to fail was rank 0: {UNREACHABLE}" in (*error.args, *error.__notes__)
    watch.stop()
    line.close()
    server.close()


def raised(work: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        work()
    return caught.value


def test_errors_of_communication_are_told_from_others():
    def wrapped() -> None:
        try:
            dist.rendezvous("none://")
        except RuntimeError as error:
            raise ExecutionError("device 0") from error

    assert waited(raised(wrapped))
    assert not waited(raised(lambda: 1 / 0))
    assert not waited(raised(lambda: torch.zeros(2) @ torch.zeros(3)))


def test_a_place_is_told():
    told = place_of(threading.get_ident())
    assert told == {"waits": False, "at": told["at"]}
    assert "failure.py" in told["at"] and told["at"].endswith("in place_of")


ENDING = """
import os, sys
from lightning_piper.processes import failure
reading, writing = os.pipe()
if sys.argv[1] == "full":
    os.set_blocking(writing, False)
    try:
        while os.write(writing, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
else:
    os.close(reading)
sys.stderr = open(writing, "w")
failure.GRACE = 0.1
failure.end("the last word")
"""


@pytest.mark.parametrize("pipe", ["full", "closed"])
def test_a_process_ends_also_where_nobody_reads_what_it_says(pipe):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, pipe], timeout=PATIENCE, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr


def test_the_lead_needs_no_name_to_reach_itself(monkeypatch):
    """Not even that of loopback, which comes of a file, as other names do of a network."""

    def unknown(host: str, *args: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", ""):
            raise socket.gaierror("no name is known")
        return known(host, *args, **options)

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    world = Lead()
    watch = FailureWatch(world, "no.such.name", [], lambda: None)  # type: ignore[arg-type]
    other = _connect("127.0.0.1", world.port)
    _send(other, {"token": world.token, "rank": 1})
    _send(other, {"over": True, "progress": None})
    watch.stop()
    other.close()
