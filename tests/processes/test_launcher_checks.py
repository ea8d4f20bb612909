"""Whether processes on other machines can reach this one at the address that gloo gives them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lightning_piper.errors import PiperError
from lightning_piper.processes.launcher_checks import check_address

OWN, OTHER = "127.0.0.1", "192.0.2.1"  # no machine has the second address: it is reserved for documentation


def check(monkeypatch: pytest.MonkeyPatch, name: str | None, main: str = OTHER) -> None:
    """Check the address of this machine, with rank 0 at `main` and this machine's name resolving to `name`
    (None: to nothing).
    """

    def known(host: str, *args: Any, **options: Any) -> Any:
        if host == "here" and name is None:
            raise socket.gaierror("not known")
        return asked(name if host == "here" else host, *args, **options)

    asked = socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", known)
    check_address(main)


@pytest.mark.parametrize(
    "name, why",
    [
        (OWN, "resolves to 127.0.0.1"),
        ("::1", "resolves to ::1|has no address"),
        (OTHER, "does not resolve to an address of this machine"),
        (None, "does not resolve to an address of this machine"),
    ],
)
def test_a_name_that_only_this_machine_understands(monkeypatch, name, why):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(PiperError, match=f"this machine's name 'here' ({why}), .*GLOO_SOCKET_IFNAME"):
        check(monkeypatch, name)


def test_what_needs_no_name(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    check(monkeypatch, OWN, main="localhost")  # all are on this machine
    monkeypatch.setattr("lightning_piper.processes.launcher_checks._is_own", lambda address: True)
    check(monkeypatch, OTHER)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check(monkeypatch, OWN)
