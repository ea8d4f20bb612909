"""A forked process changes nothing in this one, and keeps no connection open."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_piper.processes.failure import _line, _receive
from lightning_piper.runtime.same_machine import forks
from lightning_piper.runtime.same_machine.pipes import Inbox, Outbox
from lightning_piper.runtime.same_machine.shared_blocks import SharedBlocks
from tests.distributed.shared_memory import POSSIBLE

pytestmark = pytest.mark.skipif(
    not POSSIBLE, reason="processes of this machine cannot share memory, and take gloo"
)
COUNT = 1000
PATIENCE = 300.0

both = pytest.mark.parametrize("apart", [True, False], ids=["apart", "as the system forks"])


def leave(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless `apart`, turn off what the package does in a forked process, so that the failure shows."""
    if not apart:
        monkeypatch.setattr(forks, "_at_fork", weakref.WeakKeyDictionary())


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work`, run in a forked process, returns True."""
    child = os.fork()
    if child == 0:
        found = False
        try:
            found = work()
        finally:
            os._exit(0 if found else 1)
    return os.waitpid(child, 0)[1] == 0


@contextmanager
def living_child() -> Iterator[None]:
    held, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        os.read(held, 1)
        os._exit(0)
    os.close(held)
    yield
    os.close(hold)
    os.waitpid(child, 0)


@both
def test_what_a_forked_process_writes_to_a_gradient_is_its_own(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = SharedBlocks()
    x = blocks.empty(COUNT, torch.float64).fill_(1.0)
    leave(apart, monkeypatch)

    def work() -> bool:
        before = bool((x == 1.0).all())
        x.fill_(2.0)
        return before and bool((x == 2.0).all())

    assert in_child(work)
    assert bool((x == 1.0).all()) == apart
    x.fill_(3.0)  # others go on reading here
    at = int(blocks.lay(x, [1])[2])
    assert os.pread(blocks.file, x.nbytes, at) == x.numpy().tobytes()


@both
def test_a_pipe_ends_with_the_process_that_had_it(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    outbox, inbox = Outbox(writing, "rank 1", PATIENCE), Inbox(reading, "rank 2", PATIENCE if apart else 0.05)
    leave(apart, monkeypatch)
    with living_child():
        outbox.close()
        with pytest.raises(RuntimeError, match="connection closed by rank 2" if apart else "timed out"):
            inbox.receive(torch.empty(1)).wait()
    inbox.close()


@both
def test_a_line_ends_with_the_process_that_had_it(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = map(_line, socket.socketpair())
    leave(apart, monkeypatch)
    with living_child():
        own.close()
        assert other.poll(PATIENCE if apart else 0.05) == apart
        assert not apart or _receive(other) is None
    other.close()
