"""Pipes deliver messages in order, do not block senders, and report a process that does not answer."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_piper.processes.failure import waited
from lightning_piper.runtime.same_machine import pipes
from lightning_piper.runtime.same_machine.pipes import MOST, Inbox, Outbox, pipes_for, writing_end

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/fd"), reason="another process's pipes are opened through /proc"
)

Pair = tuple[Outbox, Inbox]
PATIENCE = 300.0


def connected(timeout: float = PATIENCE) -> Pair:
    reading, writing = pipes_for([0])[0]
    file = writing_end(os.getpid(), writing)
    assert file is not None
    os.close(writing)
    return Outbox(file, "rank 1", timeout), Inbox(reading, "rank 2", timeout)


@pytest.fixture
def pair() -> Iterator[Pair]:
    outbox, inbox = connected()
    yield outbox, inbox
    outbox.close()
    inbox.close()


def filled(outbox: Outbox) -> tuple[list[torch.Tensor], list[Outbox]]:
    """Return messages, of which the last eight do not fit into the pipe, and the pipes to wait for."""
    sent, left = list[torch.Tensor](), list[Outbox]()
    while len(left) < 8:
        sent.append(torch.full((MOST // 8,), len(sent)))
        left += outbox.send(sent[-1])
    return sent, left


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_messages_arrive_in_their_order(pair: Pair, dtype: torch.dtype) -> None:
    outbox, inbox = pair
    sent = [(torch.arange(n) % 2).to(dtype) for n in (1, 7, MOST // dtype.itemsize)]
    rooms = [torch.empty_like(x) for x in sent]
    works = [inbox.receive(room) for room in rooms]
    for x in sent:
        assert outbox.send(x.clone()) == []
    works[-1].wait()  # the last one first
    for room, x, work in zip(rooms, sent, works, strict=True):
        assert torch.equal(room, x)
        work.wait()


def test_who_sends_more_than_a_pipe_holds_goes_on(pair: Pair) -> None:
    outbox, inbox = pair
    sent, left = filled(outbox)
    assert len(left) < len(sent)
    rooms = [torch.empty_like(x) for x in sent]
    for work in [inbox.receive(room) for room in rooms]:  # whoever waits writes what is left
        work.wait()
    for work in left:
        work.wait()
    assert all(map(torch.equal, rooms, sent))
    assert not pipes._full


def test_what_is_left_is_written_while_another_message_is_waited_for() -> None:
    (outbox, inbox), (back, answer) = connected(), connected()
    sent, _ = filled(outbox)

    def other() -> None:  # the other process, where only this one's pipe is full
        left = len(sent) * MOST
        while left:
            select.select([inbox.file], [], [], PATIENCE)
            left -= len(os.read(inbox.file, left))
        os.write(back.file, b"read")

    reading = threading.Thread(target=other)
    reading.start()
    room = torch.empty(4, dtype=torch.uint8)
    answer.receive(room).wait()
    reading.join()
    assert bytes(room.tolist()) == b"read"
    for end in (outbox, inbox, back, answer):
        end.close()


@pytest.mark.parametrize("size", [3 * MOST, 8 * MOST])
def test_the_rest_of_a_message_follows_when_the_pipe_has_room(pair: Pair, size: int) -> None:
    """A pipe holds four of the largest messages, so the longer one does not fit."""
    outbox, inbox = pair
    sent = torch.randint(256, (size,), dtype=torch.uint8)
    room = torch.empty_like(sent)
    left = outbox.send(sent)
    assert bool(left) == (size > 4 * MOST)
    inbox.receive(room).wait()
    assert torch.equal(room, sent) and not pipes._full


def test_a_process_that_is_gone_is_named() -> None:
    outbox, inbox = connected()
    outbox.send(torch.ones(2))
    outbox.close()
    room = torch.empty(2)
    inbox.receive(room).wait()  # what it had sent is there
    assert room.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"^connection closed by rank 2$") as failure:
        inbox.receive(room).wait()
    assert waited(failure.value)
    inbox.close()
    outbox, inbox = connected()
    inbox.close()
    with pytest.raises(RuntimeError, match=r"^connection closed by rank 1$") as failure:
        outbox.send(room)
    assert waited(failure.value)
    outbox.close()


def test_a_process_that_does_not_answer_is_named() -> None:
    outbox, inbox = connected(timeout=0.05)
    with pytest.raises(RuntimeError, match=r"^timed out after 0.05 s: rank 2 does not answer$") as failure:
        inbox.receive(torch.empty(1)).wait()
    assert waited(failure.value)
    _, left = filled(outbox)
    with pytest.raises(RuntimeError, match=r"^timed out after 0.05 s: rank 1 does not answer$") as failure:
        left[0].wait()
    assert waited(failure.value)
    outbox.close()
    inbox.close()
    assert not pipes._full


def test_what_nobody_waits_for_any_more_is_left() -> None:
    outbox, inbox = connected()
    filled(outbox)
    assert len(pipes._full) == 1
    inbox.close()
    del outbox  # of a training that has failed: the next one is not to write to it
    gc.collect()
    assert not pipes._full


def test_a_message_of_nothing_is_there(pair: Pair) -> None:
    outbox, inbox = pair
    nothing, room = inbox.receive(torch.empty(0)), torch.empty(1)
    outbox.send(torch.empty(0))
    outbox.send(torch.ones(1))
    for work in (nothing, inbox.receive(room)):
        work.wait()
    assert room.item() == 1.0


def test_what_is_no_pipe_is_not_opened() -> None:
    with open(os.devnull) as file:
        assert writing_end(os.getpid(), file.fileno()) is None
    assert writing_end(os.getpid(), 10**6) is None
