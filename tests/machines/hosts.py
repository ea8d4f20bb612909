"""Two hosts on this machine: namespaces with their own network, host name, mounts, IPC and processes, joined by a
link (`wire`).

All namespaces belong to processes that end when this process closes their standard input or ends, so that the
kernel removes namespaces, interfaces and processes in every case.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.machines import wire
from tests.strategy.scenarios import popen

PORT = "29500"  # each network is new, so that every port of it is free
# Runs in the namespaces of a host: prints the number of its process as other namespaces see it, and stays until
# its standard input ends.
HOLD = """
read process rest < /proc/self/stat
set -e
hostname "$1"
[ -z "$4" ] || mount -t proc proc /proc
[ -z "$2" ] || mount --bind "$2" /proc/sys/kernel/random/boot_id
[ -z "$3" ] || mount -t tmpfs tmpfs /dev/shm
echo $process
exec cat
"""


@dataclass(frozen=True)
class Host:
    """Attributes:
    name: The host name.
    kernel: Whether the host has booted its own kernel, as a machine; if not, it is a container of this machine.
    memory: Whether it has its own /dev/shm.
    processes: Whether it has its own process IDs.
    """

    name: str
    kernel: bool = True
    memory: bool = True
    processes: bool = True


@dataclass
class Network:
    """Two hosts and their link.

    Attributes:
        enter: For each host, the command that runs another command there.
        addresses: The address of each host.
        started: The processes on the hosts.
    """

    enter: list[list[str]]
    addresses: list[str] = field(default_factory=lambda: [wire.ADDRESS.format(host) for host in (1, 2)])
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command on a host. `environment` is added to its environment."""
        process = popen([*self.enter[host], *command], GLOO_SOCKET_IFNAME=wire.INTERFACE, **environment)
        self.started.append(process)
        return process

    def start_ranks(self, command: Sequence[str], on_each: int = 2) -> list[subprocess.Popen[str]]:
        """Start a Python command as ranks of one run, with the variables of torchrun, `on_each` on each host."""
        return [
            self.start(
                host,
                [sys.executable, *command],
                TORCHELASTIC_RUN_ID="hosts",
                MASTER_ADDR=self.addresses[0],
                MASTER_PORT=PORT,
                RANK=str(host * on_each + local),
                LOCAL_RANK=str(local),
                GROUP_RANK=str(host),
                WORLD_SIZE=str(2 * on_each),
                LOCAL_WORLD_SIZE=str(on_each),
            )
            for host in range(2)
            for local in range(on_each)
        ]

    def sent(self, host: int) -> int:
        """The number of bytes that a host has sent."""
        command = [*self.enter[host], "cat", "/proc/net/dev"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(text.partition(f"{wire.INTERFACE}:")[2].split()[8])

    def sent_again(self, host: int) -> int:
        """The number of packets that a host has sent again, because they were lost."""
        command = [*self.enter[host], "cat", "/proc/net/snmp"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names, numbers = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        return int(numbers[names.index("RetransSegs")])

    def cut(self, host: int) -> None:
        """Take the interface of a host down. The other host only sees that no packet comes any more."""
        subprocess.run([*self.enter[host], *f"ip link set {wire.INTERFACE} down".split()], check=True)


def missing() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has namespaces"
    try:
        with joined((Host("a"), Host("b")), Path(os.devnull)) as network:
            network.sent(0)
            return ""
    except (OSError, subprocess.SubprocessError, ConnectionError) as error:
        return f"network namespaces cannot be made here: {error}"


@contextlib.contextmanager
def joined(
    hosts: tuple[Host, Host], boots: Path, latency: float = 0.0, loss: float = 0.0
) -> Iterator[Network]:
    """Two hosts and their link.

    Args:
        boots: A folder for the files with the boot IDs of hosts that have their own kernel. If it is no folder,
            all hosts have the boot ID of this machine.
        latency: Seconds that each packet takes from host to host.
        loss: The share of packets that are lost.

    Raises:
        OSError, subprocess.SubprocessError, ConnectionError: This machine does not allow such hosts.
    """
    with contextlib.ExitStack() as ended:
        held = [_hold(host, boots, ended) for host in hosts]
        link = [sys.executable, wire.__file__, *map(str, held), str(latency), str(loss)]
        _first_line(["unshare", "--net", *link], ended)
        network = Network([_entering(*each) for each in zip(held, hosts, strict=True)])
        try:
            yield network
        finally:
            for process in network.started:  # those in process namespaces of their own end with these
                with process:
                    process.kill()


def _entering(process: int, host: Host) -> list[str]:
    """The command that runs another command in the namespaces of a process, until this process ends."""
    kinds = ["net", "uts", "mount", "ipc", *["pid"] * host.processes]
    return ["setpriv", "--pdeathsig=KILL", "nsenter", f"--target={process}", *(f"--{kind}" for kind in kinds)]


def _hold(host: Host, boots: Path, ended: contextlib.ExitStack) -> int:
    """Make the namespaces of a host. Returns the ID of the process that holds them."""
    boot = ""
    if host.kernel and boots.is_dir():
        file = boots / f"boot-{uuid.uuid4()}"
        file.write_text(f"{uuid.uuid4()}\n")
        boot = str(file)
    apart = ["--pid", "--fork", "--kill-child"] if host.processes else []
    kept = [host.name, boot, "own" if host.memory else "", "own" if host.processes else ""]
    command = ["unshare", "--net", "--uts", "--mount", "--ipc", *apart, "sh", "-c", HOLD, "sh", *kept]
    return int(_first_line(command, ended))


def _first_line(command: Sequence[str], ended: contextlib.ExitStack) -> str:
    """Start a process that runs until `ended` is closed. Returns the first line that it prints.

    Raises:
        ConnectionError: It has ended without one; the message is what it has said.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ended.callback(_end, process)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise ConnectionError(process.stderr.read().strip())
    return line


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
