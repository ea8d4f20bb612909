"""Two nodes, tried on one machine: as two sets of processes over loopback, started by Lightning's launcher
and with SLURM's variables, and as two hosts with their own addresses, on which torchrun starts the processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import LIMIT, free_port, launch
from tests.machines import hosts
from tests.machines.hosts import Host, Network
from tests.strategy import nodes
from tests.strategy.scenarios import equal, popen


def on_two_nodes(folder: Path, network: Network | None = None) -> list[list[dict[str, torch.Tensor]]]:
    """The values with which each of four processes has ended: on two hosts with torchrun, or over loopback with
    Lightning's launcher.
    """
    port = str(free_port())
    running = []
    for node in range(2):
        if network is not None:
            where = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", f"--master-port={port}"]
            where.append(f"--master-addr={network.addresses[0]}")
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *where,
                nodes.__file__,
                str(folder),
                "2",
            ]
            running.append(network.start(node, command))
        else:
            about = {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, nodes.__file__, str(folder), "2"]
            running.append(popen(command, GLOO_SOCKET_IFNAME="lo", **about))
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
    check(one_node, on_two_nodes(tmp_path))


def test_two_nodes_of_slurm(one_node: list[list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    check(one_node, launch(4, nodes.train_in_slurm, tmp_path, joined=False))


@pytest.mark.long
def test_two_nodes_by_torchrun(one_node: list[list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    if problem := hosts.missing():
        pytest.skip(problem)
    with hosts.joined((Host("first"), Host("second")), tmp_path) as network:
        check(one_node, on_two_nodes(tmp_path, network))
        assert network.sent(0) > 100_000  # bytes; 426,165 were measured
