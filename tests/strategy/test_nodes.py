"""Two nodes, tried as two sets of processes on one machine: by Lightning's launcher, and by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.strategy import nodes
from tests.strategy.scenarios import ROOT, equal

LIMIT = 180


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_nodes(count: int, folder: Path, torchrun: bool) -> list[dict[str, torch.Tensor]]:
    """What each of four processes ended with."""
    folder.mkdir()
    port = str(free_port())
    own = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in own}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = []
    for node in range(count):
        if torchrun:
            where = [f"--nnodes={count}", f"--nproc-per-node={4 // count}", f"--node-rank={node}", f"--master-port={port}"]
            command, more = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", *where], {}
        else:
            command, more = [], {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *command, nodes.__file__, str(folder), str(count)]
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=env | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * count, "\n".join(text[-4000:] for text in said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return on_nodes(1, tmp_path_factory.mktemp("nodes") / "one", torchrun=False)


@pytest.mark.parametrize("torchrun", [False, True], ids=["lightning", "torchrun"])
def test_two_nodes_train_as_one(torchrun: bool, one_node: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    ranks = on_nodes(2, tmp_path / "two", torchrun)
    assert all(equal(one_node[0], rank) for rank in (*one_node, *ranks))
    losses = one_node[0]["losses"]
    assert len(losses) == 5 and len(set(losses.tolist())) == 5
