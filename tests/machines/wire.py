"""The link between two hosts, as a script: `wire.py PID PID SECONDS LOSS`. It gives the network namespace of each
process an interface, and carries frames from one to the other.

The kernel has no such link everywhere: netem is a module. Each frame arrives a fixed time later, and some frames
never arrive. The script says "ready" when the link is up, and carries frames until its standard input ends. With
its own network namespace, the interfaces end with it.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

INTERFACE = "eth0"  # the name of the interface on each host
ADDRESS = "10.77.0.{}"  # of host 1 and host 2
ALL, PACKET, WITH_HEADERS, OUTGOING = 0x0003, 263, 15, 4  # of linux/if_ether.h and linux/if_packet.h
LARGEST = 2**17  # bytes of a frame


def connect(host: int, process: int) -> socket.socket:
    """Connect a host to this namespace. Returns a socket with the host's frames.

    A frame begins with what the kernel has not computed yet, such as its checksum: the receiver does it.
    """
    end = f"host{host}"
    for command in (
        f"ip link add {end} type veth peer name {INTERFACE} netns {process}",
        f"ip link set {end} up",
        # The host sends one packet a frame, so that a lost frame is one lost packet.
        f"nsenter --target {process} --net ip link set {INTERFACE} gso_max_segs 1",
        f"nsenter --target {process} --net ip address add {ADDRESS.format(host)}/24 dev {INTERFACE}",
        f"nsenter --target {process} --net ip link set lo up",
        f"nsenter --target {process} --net ip link set {INTERFACE} up",
    ):
        subprocess.run(command.split(), check=True)
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    frames.setsockopt(PACKET, WITH_HEADERS, 1)
    frames.bind((end, ALL))
    frames.setblocking(False)
    return frames


def carry(hosts: Sequence[socket.socket], latency: float, loss: float) -> None:
    """Carry frames between two hosts until the standard input ends.

    Args:
        hosts: The sockets of both hosts.
        latency: Seconds from the arrival of a frame to its delivery.
        loss: The share of frames that are lost.
    """
    draw = random.Random(1)
    underway: list[tuple[float, int, int, bytes]] = []  # (time of delivery, number, host, frame)
    count = 0
    while True:
        patience = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        ready, _, _ = select.select([*hosts, sys.stdin], [], [], patience)
        if sys.stdin in ready:
            return
        for host, frames in enumerate(hosts):
            if frames in ready:
                frame, about = frames.recvfrom(LARGEST)
                if about[2] != OUTGOING and draw.random() >= loss:
                    count += 1
                    heapq.heappush(underway, (time.monotonic() + latency, count, 1 - host, frame))
        while underway and underway[0][0] <= time.monotonic():
            _, _, host, frame = heapq.heappop(underway)
            with contextlib.suppress(OSError):  # the interface is down, or its queue is full
                hosts[host].send(frame)


if __name__ == "__main__":
    first, second, latency, loss = sys.argv[1:]
    sockets = [connect(host, int(process)) for host, process in enumerate((first, second), 1)]
    print("ready", flush=True)
    carry(sockets, float(latency), float(loss))
