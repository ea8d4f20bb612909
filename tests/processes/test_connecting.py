"""Processes that connect again after a loss: one that fails leaves no other process waiting."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

import pytest

from lightning_piper.processes.spares import Spares
from lightning_piper.runtime.connections import noted_connections
from tests.distributed.processes import free_port
from tests.runtime.test_connections import pair


def fail_while_connecting(spares: Spares, ended: contextlib.ExitStack) -> bool:
    """Fail after a connection is made. Return whether the connection is broken."""
    with contextlib.suppress(RuntimeError), spares.connecting([]):
        with noted_connections():
            one, other, _ = pair(ended)
        raise RuntimeError("a pair is closed")
    with contextlib.suppress(OSError):
        one.sendall(b"x")
    return other.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_a_process_that_fails_breaks_its_connections() -> None:
    port, patience = free_port(), timedelta(seconds=300)
    with contextlib.ExitStack() as ended:
        for is_rank_zero in (True, False):
            spares = Spares("127.0.0.1", port, 2, 1, is_rank_zero, patience, lambda number: True)
            ended.callback(spares.end)
            assert not fail_while_connecting(spares, ended)  # the negative control: the observer ends the run
            spares.generation = 1
            assert fail_while_connecting(spares, ended)
