"""Two nodes, tried on one machine: as two sets of processes over loopback, started by Lightning's launcher
and with SLURM's variables, and as two network namespaces with their own addresses, started by torchrun.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import LIMIT, free_port, launch
from tests.strategy import nodes
from tests.strategy.scenarios import equal, popen


@dataclass(frozen=True)
class Network:
    """Attributes:
    enter: For each node, the command that runs another command on it.
    address: The address of the first node.
    interfaces: For each node, the interface over which it reaches the other.
    """

    enter: list[list[str]]
    address: str
    interfaces: list[str]


LOOPBACK = Network([[], []], "127.0.0.1", ["lo", "lo"])


@pytest.fixture
def network() -> Iterator[Network]:
    """Two network namespaces, joined by a pair of virtual interfaces; loopback if they cannot be made."""
    names = [f"piper-{os.getpid()}-{node}" for node in range(2)]
    problem = joined(*names)
    if problem:
        warnings.warn(f"nodes over loopback, for there are no network namespaces: {problem}", stacklevel=1)
        yield LOOPBACK
    else:
        yield Network([["ip", "netns", "exec", name] for name in names], "10.77.0.1", ["veth0", "veth1"])
    for name in names if shutil.which("ip") else []:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def joined(first: str, second: str) -> str:
    """Make two network namespaces with these names. Returns why they cannot be made, if so."""
    commands = [f"ip netns add {first}", f"ip netns add {second}"]
    commands.append(f"ip -n {first} link add veth0 type veth peer name veth1 netns {second}")
    for node, name in enumerate((first, second)):
        commands.append(f"ip -n {name} address add 10.77.0.{node + 1}/24 dev veth{node}")
        commands += [f"ip -n {name} link set {interface} up" for interface in ("lo", f"veth{node}")]
        commands.append(f"ip netns exec {name} true")
    for command in commands:
        try:
            subprocess.run(command.split(), capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"{command}: {error}"
    return ""


def on_two_nodes(
    folder: Path, torchrun: bool, network: Network = LOOPBACK
) -> list[list[dict[str, torch.Tensor]]]:
    """The values with which each of four processes has ended."""
    port = str(free_port())
    running = []
    for node in range(2):
        if torchrun:
            where = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", f"--master-port={port}"]
            command, more = ["-m", "torch.distributed.run", f"--master-addr={network.address}", *where], {}
        else:
            command, more = [], {"NODE_RANK": str(node), "MASTER_ADDR": network.address, "MASTER_PORT": port}
        command = [*network.enter[node], sys.executable, *command, nodes.__file__, str(folder), "2"]
        running.append(popen(command, GLOO_SOCKET_IFNAME=network.interfaces[node], **more))
    try:
        said = [process.communicate(timeout=LIMIT.total_seconds())[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(text[-4000:] for text in said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, torch.Tensor]]]:
    return launch(4, nodes.train_in_torchrun, tmp_path_factory.mktemp("one node"), joined=False)


def check(one_node: list[list[dict[str, torch.Tensor]]], found: list[list[dict[str, torch.Tensor]]]) -> None:
    for rank in (*one_node, *found):
        assert isinstance(rank, list), rank
        assert equal(one_node[0], rank)


def test_what_is_trained(one_node: list[list[dict[str, torch.Tensor]]]) -> None:
    sharded, whole = (training["losses"] for training in one_node[0])
    assert len(sharded) == 7 and len(set(sharded.tolist())) == 7 and torch.allclose(sharded, whole, rtol=1e-5)


@pytest.mark.long
def test_two_nodes_by_lightning(one_node: list[list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    check(one_node, on_two_nodes(tmp_path, torchrun=False))


def test_two_nodes_of_slurm(one_node: list[list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    check(one_node, launch(4, nodes.train_in_slurm, tmp_path, joined=False))


@pytest.mark.long
def test_two_nodes_by_torchrun(
    one_node: list[list[dict[str, torch.Tensor]]], network: Network, tmp_path: Path
) -> None:
    check(one_node, on_two_nodes(tmp_path, torchrun=True, network=network))
    if network is not LOOPBACK:
        counter = ["cat", "/sys/class/net/veth0/statistics/tx_bytes"]
        sent = int(
            subprocess.run([*network.enter[0], *counter], capture_output=True, text=True, check=True).stdout
        )
        assert sent > 100_000  # 426,165 bytes were measured
