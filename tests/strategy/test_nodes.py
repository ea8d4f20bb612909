"""Two nodes, tried as two sets of processes on one machine: by Lightning's launcher, and by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import free_port, launch
from tests.strategy import nodes
from tests.strategy.scenarios import equal, popen

LIMIT = 180


def on_two_nodes(folder: Path, torchrun: bool) -> list[list[dict[str, torch.Tensor]]]:
    """What each of four processes ended with."""
    port = str(free_port())
    running = []
    for node in range(2):
        if torchrun:
            where = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", f"--master-port={port}"]
            command, more = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", *where], {}
        else:
            command, more = [], {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *command, nodes.__file__, str(folder), "2"]
        running.append(popen(command, GLOO_SOCKET_IFNAME="lo", **more))
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(text[-4000:] for text in said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, torch.Tensor]]]:
    return launch(4, nodes.train, tmp_path_factory.mktemp("one node"), 1, joined=False)


@pytest.mark.parametrize("torchrun", [False, True], ids=["lightning", "torchrun"])
def test_two_nodes_train_as_one(torchrun: bool, one_node: list[list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    for rank in (*one_node, *on_two_nodes(tmp_path, torchrun)):
        assert isinstance(rank, list), rank
        assert equal(one_node[0], rank)
    sharded, whole = (training["losses"] for training in one_node[0])
    assert len(sharded) == 7 and len(set(sharded.tolist())) == 7 and torch.allclose(sharded, whole, rtol=1e-5)
