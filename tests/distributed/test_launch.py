"""Launches report how a rank failed, and no trace of it remains for the next launch."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import launch, run_ranks

PREPARED: list[str] = []


def prepare(kind: str) -> None:
    PREPARED.append(kind)


def work(rank: int, kind: str) -> tuple[float, list[str]]:
    """Return a sum over the ranks, if the last rank gets that far."""
    if rank == 1:
        print(f"rank 1 will {kind}", flush=True)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(1000)
        if kind == "raise":
            raise ValueError("something")
    total = torch.tensor(rank + 1.0)
    if kind == "sum":
        dist.all_reduce(total)
    return total.item(), PREPARED


def test_each_launch_is_a_fresh_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 ended with -9; it said:\nrank 1 will die"):
        launch(2, work, tmp_path / "die", "die", prepare=prepare)
    with pytest.raises(AssertionError, match=r"rank 1 of 2 hangs; it said:\nrank 1 will hang"):
        launch(2, work, tmp_path / "hang", "hang", prepare=prepare, joined=False, limit=timedelta(seconds=10))
    with pytest.raises(AssertionError, match=r"(?s)prepare .* ended with 1; it said:.*TypeError"):
        launch(2, work, tmp_path / "other", prepare=prepare)
    first, second = run_ranks(2, work, tmp_path / "raise", "raise", prepare=prepare)
    assert first.result == (1.0, ["raise"])
    assert isinstance(second.result, ValueError) and "ValueError: something" in second.said
    assert launch(3, work, tmp_path / "sum", "sum", prepare=prepare) == [(6.0, ["sum"])] * 3
