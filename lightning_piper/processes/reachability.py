"""Whether the machine at the other end of a connection can still be reached.

TCP does not report a cut link: a process that waits for a message waits forever. So the system asks the other system
every second whether it is there (TCP keepalive). The other system answers, however busy its processes are, and even if
they are stopped. This package then reads how long ago the last answer came.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

LOST = 5.0  # seconds without an answer after which a machine counts as lost
OFTEN = 1.0  # seconds between two questions

_READS = sys.platform == "linux"
# Bytes of `struct tcp_info` before `tcpi_last_ack_recv`, which is the milliseconds since the last answer.
_BEFORE = 56


def keep_asking(connected: socket.socket) -> None:
    """Make the system ask every `OFTEN` seconds whether the machine at the other end is there."""
    if _READS and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(OFTEN))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(OFTEN))


def is_lost(file: int) -> bool:
    """Return whether the other machine has not answered for `LOST` seconds.

    Always False on systems other than Linux, and for a connection within this machine, whose last answer is also old
    after the whole machine has paused.

    Args:
        file: The file descriptor of a socket for which `keep_asking` was called.
    """
    if not _READS:
        return False
    with socket.socket(fileno=os.dup(file)) as connected, contextlib.suppress(OSError):  # it has ended
        if connected.getpeername()[0] == connected.getsockname()[0]:
            return False
        found = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BEFORE + 4)
        return int.from_bytes(found[_BEFORE:], sys.byteorder) >= 1000 * LOST
    return False
