"""Who is held to have failed first, from what rank 0 hears; without processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_piper.errors import ExecutionError
from lightning_piper.processes import failure
from lightning_piper.processes.failure import (
    GONE,
    SILENT,
    FailureWatch,
    _connect,
    _Judge,
    _listen,
    _receive,
    _send,
    place_of,
    waited,
)

PATIENCE = 300.0  # seconds; longer than any machine needs for what is waited for here
TOKEN = "token of this run"
TIMED_OUT = "ExecutionError: device 0: recv failed: Timed out waiting 6000ms for recv operation to complete"
CLOSED = "ExecutionError: device 0: recv failed: Connection closed by peer"


class Ranks:
    """Three ranks and their judge."""

    def __init__(self) -> None:
        server = _listen()
        self.port = server.getsockname()[1]
        self.judge = _Judge(server, 3, TOKEN)
        self.thread = threading.Thread(target=self.judge.run, daemon=True)
        self.thread.start()
        self.lines: dict[int, Connection] = {}

    def connect(self, *ranks: int) -> None:
        for rank in ranks:
            self.lines[rank] = _connect("localhost", self.port)
            _send(self.lines[rank], {"token": TOKEN, "rank": rank})

    def failed(self, rank: int, why: str, waited: bool = True) -> None:
        _send(self.lines[rank], {"failed": why, "rank": rank, "waited": waited})

    def hear(self, rank: int) -> dict[str, Any]:
        assert self.lines[rank].poll(PATIENCE)
        message = _receive(self.lines[rank])
        assert message is not None
        return message

    def answer(self, rank: int, waits: bool) -> None:
        assert self.hear(rank) == {"where": True}
        _send(self.lines[rank], {"waits": waits, "at": f"place of {rank}"})

    def settle(self, *heard: int) -> None:
        """The time for words of others is over, when the judge has those of these ranks, some of which answered."""
        while not all(rank in self.judge.places or rank in self.judge.failed for rank in heard):
            pass
        self.judge._until = 0.0
        rank, answer = next(iter(self.judge.places.items()))
        _send(self.lines[rank], answer)  # once more: it looks at the clock

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
    _send(ranks.lines[0], {"over": True})
    assert ranks.hear(1) == ranks.hear(2) == {"left": True}
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


def test_strangers_are_not_heard(ranks):
    stranger = _connect("localhost", ranks.port)
    _send(stranger, {"token": "", "rank": 0})
    assert stranger.poll(PATIENCE) and _receive(stranger) is None
    _connect("localhost", ranks.port).close()
    ranks.connect(0, 1, 2)
    ranks.failed(0, "ValueError: x", waited=False)
    assert ranks.verdict(2) == (0, "ValueError: x")


class Lead:
    """A world of two, of which this is rank 0."""

    rank, size, is_rank_zero = 0, 2, True

    def broadcast(self, value: Any) -> Any:
        self.port, self.token = value
        return value


def test_the_lead_stays_until_all_have_heard(monkeypatch):
    monkeypatch.setattr(failure, "SETTLE", PATIENCE)
    world = Lead()
    watch = FailureWatch(world, "localhost", [])  # type: ignore[arg-type]
    other = _connect("localhost", world.port)
    _send(other, {"token": world.token, "rank": 1})
    watch.report(ValueError("of its own"))
    leaving = threading.Thread(target=watch.stop)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    assert other.poll(PATIENCE)
    assert _receive(other) == {"first": 0, "why": "ValueError: of its own", "silent": []}
    other.close()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()


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
