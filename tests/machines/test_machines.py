"""Trainings on two hosts, with the result of one device: over a link with latency and loss, and where names and
memory do not say which processes are on one machine.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.processes import LIMIT
from tests.machines import cut, hosts, training
from tests.machines.hosts import Host, Network, joined

ROUNDING = 1e-14  # 3.9e-16 measured
# Pairs of hosts that are hard to tell apart, or to take for one machine -> the number of processes of a machine, and
# whether processes of both hosts can reach each other's memory.
ODD = {
    "one name on two machines": ((Host("node"), Host("node")), 2, False),
    "two containers of one name": ((Host("node", kernel=False), Host("node", kernel=False)), 4, False),
    "two containers that see each other's processes": (
        (Host("node", kernel=False, processes=False), Host("node", kernel=False, processes=False)),
        4,
        True,
    ),
    "two names and one /dev/shm": (
        (Host("first", kernel=False, memory=False), Host("second", kernel=False, memory=False)),
        4,
        False,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if problem := hosts.missing():
        pytest.skip(problem)


@pytest.fixture(scope="module")
def one_device() -> dict[str, Tensor]:
    _, module = training.fit("auto", devices=1)
    return module.state_dict()


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items())


def finish(network: Network, command: list[str]) -> None:
    """Run a script on both hosts until its end."""
    ranks = network.start_ranks(command)
    said = [rank.communicate(timeout=LIMIT.total_seconds())[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(text[-4000:] for text in said)


def check_trained(name: str, folder: Path, wanted: dict[str, Tensor]) -> None:
    assert far(torch.load(folder / f"{name}.ckpt", weights_only=False)["state_dict"], wanted) < ROUNDING, name


def on_one_host(ranks: tuple[int, ...]) -> bool:
    return len({rank // 2 for rank in ranks}) == 1


def test_other_steps_are_told_apart(one_device: dict[str, Tensor]) -> None:
    """The negative control."""
    _, module = training.fit("auto", devices=1, steps=7)
    assert far(module.state_dict(), one_device) > 1e6 * ROUNDING


@pytest.mark.long
def test_programs_over_a_link_with_latency_and_loss(one_device: dict[str, Tensor], tmp_path: Path) -> None:
    with joined((Host("first"), Host("second")), tmp_path, latency=0.002, loss=0.01) as network:
        finish(network, [training.__file__, str(tmp_path), *training.PROGRAMS])
        assert sum(map(network.sent_again, range(2))) > 0
    for name in training.PROGRAMS:
        check_trained(name, tmp_path, one_device)
        for rank in range(4):
            shared, neighbors = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert neighbors == 2 and shared == {ranks: on_one_host(ranks) for ranks in shared}, name


@pytest.mark.long
@pytest.mark.parametrize("pair", ODD)
def test_odd_hosts(pair: str, one_device: dict[str, Tensor], tmp_path: Path) -> None:
    both, count, reachable = ODD[pair]
    with joined(both, tmp_path) as network:
        finish(network, [training.__file__, str(tmp_path), "pp2 dp2"])
    check_trained("pp2 dp2", tmp_path, one_device)
    for rank in range(4):
        shared, neighbors = torch.load(tmp_path / f"pp2 dp2-{rank}.pt")
        assert {on_one_host(ranks) for ranks in shared} == {False, True}
        assert shared == {ranks: reachable or on_one_host(ranks) for ranks in shared}
        assert neighbors == count


def wait_for(file: int, ranks: list[subprocess.Popen[str]]) -> None:
    """Wait until something is written to a named pipe, or a rank has ended."""
    ended = [os.pidfd_open(rank.pid) for rank in ranks]
    ready, _, _ = select.select([file, *ended], [], [], LIMIT.total_seconds())
    for each in ended:
        os.close(each)
    assert file in ready, [rank.returncode for rank in ranks]


@pytest.mark.long
@pytest.mark.parametrize("name, host", [("pp2 dp2", 0), ("zero3", 1)])
def test_a_cut_link_is_an_error_that_names_a_rank(name: str, host: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)
    with joined((Host("first"), Host("second")), tmp_path, latency=0.002) as network:
        ranks = network.start_ranks([cut.__file__, name, "cut", str(tmp_path / "begun")])
        wait_for(begun, ranks)
        began = time.time()
        network.cut(host)
        said = [rank.communicate(timeout=LIMIT.total_seconds())[0] for rank in ranks]
    os.close(begun)
    for rank, text in enumerate(said):
        found = re.search(rf"^at (\S+) rank {rank} says: (.*)", text, re.MULTILINE)
        assert found, text
        assert float(found[1]) - began < 10.0, text
        lost = "rank [23]" if rank < 2 else "rank 0"
        assert re.search(rf"The first process to fail was {lost}: its machine has not answered", text), text
    assert [rank.returncode for rank in ranks] == [1] * 4


@pytest.mark.long
def test_a_rank_that_is_slow_is_not_taken_for_lost(tmp_path: Path) -> None:
    with joined((Host("first"), Host("second")), tmp_path, latency=0.01, loss=0.03) as network:
        finish(network, [cut.__file__, "zero3", "slow", str(tmp_path)])
