"""Whether the machine of a process is lost. Machines that are lost are in `tests/machines`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from lightning_piper.processes import reachability
from lightning_piper.processes.reachability import is_lost, keep_asking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when the last answer came")


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: between processes of one address, or of two addresses as on two machines."""
    with contextlib.ExitStack() as ended:
        server = ended.enter_context(socket.create_server((request.param, 0)))
        one = ended.enter_context(
            socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        )
        other = ended.enter_context(server.accept()[0])
        for each in (one, other):
            keep_asking(each)
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        yield one, other


def test_another_machine_is_lost_if_its_last_answer_is_old(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    assert not is_lost(one.fileno()) and not is_lost(other.fileno())
    monkeypatch.setattr(reachability, "LOST", 0.0)
    two = one.getsockname()[0] != other.getsockname()[0]
    assert is_lost(one.fileno()) == is_lost(other.fileno()) == two
    one.sendall(b"x")  # the sockets are still open
    assert other.recv(1) == b"x"


def test_a_connection_that_has_ended_is_not_lost(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "LOST", 0.0)
    one, other = ends
    one.shutdown(socket.SHUT_RDWR)
    assert other.recv(1) == b""
    other.shutdown(socket.SHUT_RDWR)
    assert not is_lost(one.fileno())
