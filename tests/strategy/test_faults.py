"""Faults on one of four processes (`benchmarks/faults.py` draws more of them), and recovery by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_piper.processes import failure
from tests.distributed.processes import LIMIT, Ended, launch
from tests.groups import marked
from tests.strategy import faults, restarted
from tests.strategy.faults import KINDS, MOMENTS, NONE, Fault, draw
from tests.strategy.scenarios import equal, popen

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="breaks connections and looks for stopped processes in /proc"
)


FAULTS = [
    Fault(0, "kill", "checkpoint", "sharded", 12),
    Fault(3, "link", "step", "sharded", 9),
    Fault(0, "kill", "checkpoint", "sharded", 12, behind=True),
    Fault(1, "raise", "compile"),
    Fault(2, "memory", "forward"),
    Fault(0, "exit", "optimizer"),
    Fault(2, "sleep", "data"),
]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return faults.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "fault",
    marked(FAULTS, FAULTS[:2]),
    ids=lambda fault: f"{fault.kind} {fault.moment}{' behind' * fault.behind}",
)
def test_a_fault(fault, wanted, tmp_path):
    assert faults.inject(fault, tmp_path, wanted).wrong == []


def test_drawn_faults_are_of_all_kinds_at_all_moments():
    drawn = draw(len(KINDS) * len(MOMENTS), 0)
    assert {(fault.kind, fault.moment) for fault in drawn} == {
        (kind, moment) for kind in KINDS for moment in MOMENTS
    }
    assert {fault.rank for fault in drawn} == set(range(faults.RANKS))
    assert drawn == draw(len(drawn), 0) != draw(len(drawn), 1)


def test_what_is_judged_can_be_wrong(tmp_path):
    said = "The first process to fail was rank 1: ValueError"
    assert faults._judged(Fault(1, "raise", "step"), 0, Ended(0, 0.0, None, said)) == []
    assert faults._judged(Fault(2, "raise", "step"), 0, Ended(0, 0.0, None, said))
    assert faults._judged(Fault(1, "raise", "step"), 0, Ended(None, 0.0, None, said)) == ["rank 0 hangs"]
    torch.save({}, tmp_path / "a.ckpt")
    assert faults._damaged(tmp_path) == []
    os.truncate(tmp_path / "a.ckpt", 100)
    (tmp_path / "b.ckpt").mkdir()
    assert len(faults._damaged(tmp_path)) == 2


@pytest.mark.long
def test_torchrun_restarts(tmp_path):
    """One of two processes is killed in the third epoch; both are started again and go on from the end of the
    second.
    """
    (alone, *_) = launch(
        2, faults.train, tmp_path / "alone", tmp_path / "alone", NONE, "consolidated", 2, joined=False
    )
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.1",
        "--standalone",
    ]
    run = popen(
        [sys.executable, *command, restarted.__file__, str(tmp_path), "1", "kill"], GLOO_SOCKET_IFNAME="lo"
    )
    try:
        said, _ = run.communicate(timeout=LIMIT.total_seconds())
    finally:
        run.kill()
    assert run.returncode == 0, said[-8000:]
    assert f"The first process to fail was rank 1: {failure.GONE}" in said
    for rank in range(2):
        found = torch.load(Path(tmp_path, f"rank{rank}.pt"), weights_only=True)
        assert found["attempt"] == 1
        assert len(found["losses"]) < len(alone["losses"])  # it did not begin anew
        assert equal(found["values"], alone["values"])
