"""Whether the machine of a process is lost. Machines that are lost are in `tests/machines`."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from lightning_piper.processes import reachability
from lightning_piper.processes.reachability import is_lost, keep_asking


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when the last answer came")
def test_a_machine_is_lost_if_its_last_answer_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as ended:
        server = ended.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = ended.enter_context(socket.create_connection(server.getsockname()))
        other = ended.enter_context(server.accept()[0])
        for each in (one, other):
            keep_asking(each)
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert not is_lost(each.fileno())
        monkeypatch.setattr(reachability, "LOST", 0.0)
        assert is_lost(one.fileno()) and is_lost(other.fileno())
        one.sendall(b"x")  # the sockets are still open
        assert other.recv(1) == b"x"
