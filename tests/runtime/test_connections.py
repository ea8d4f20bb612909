"""Connections of groups, which can be broken."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from lightning_piper.runtime.connections import break_connections, noted_connections

PATIENCE = 300.0


def pair(ended: contextlib.ExitStack) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Both ends of a connection, and the socket that listens."""
    server = ended.enter_context(socket.create_server(("127.0.0.1", 0)))
    one = ended.enter_context(socket.create_connection(server.getsockname(), PATIENCE))
    other = ended.enter_context(server.accept()[0])
    other.settimeout(PATIENCE)
    return one, other, server


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_noted_connections_break() -> None:
    with contextlib.ExitStack() as ended:
        before = pair(ended)
        with noted_connections():
            one, other, server = pair(ended)
        after = pair(ended)
        break_connections()
        assert one.recv(1) == other.recv(1) == b""
        for first, second, _ in (before, after):  # the negative control
            first.sendall(b"x")
            assert second.recv(1) == b"x"
        # A socket that listens does so still.
        ended.enter_context(socket.create_connection(server.getsockname(), PATIENCE))
        ended.enter_context(server.accept()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_a_socket_with_the_number_of_a_closed_one_stays() -> None:
    with contextlib.ExitStack() as ended:
        with noted_connections():
            closed = pair(ended)
        numbers = {each.fileno() for each in closed}
        for each in closed:
            each.close()
        one, other, server = pair(ended)
        assert {one.fileno(), other.fileno(), server.fileno()} & numbers
        break_connections()
        one.sendall(b"x")
        assert other.recv(1) == b"x"
