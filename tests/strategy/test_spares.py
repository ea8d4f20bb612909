"""A fit that loses a process goes on with a spare, and ends with the same bits as an undisturbed fit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import Ended, launch_trainings, run_ranks
from tests.strategy.scenarios import equal
from tests.strategy.spared import MOMENTS, train


def lose(folder: Path, size: int, moment: str, kind: str = "") -> list[Ended]:
    """Train with one spare, and lose rank 1."""
    ends = run_ranks(size + 1, train, folder, folder, size, moment, kind, joined=False)
    assert ends[1].exitcode == -signal.SIGKILL, ends[1].said[-3000:]
    return ends


def check(ends: list[Ended], wanted: dict[str, Any]) -> None:
    """Check that all processes of the training except the lost one end like an undisturbed training."""
    for end in (ends[0], *ends[2:]):
        assert isinstance(end.result, dict), "\n".join(each.said[-3000:] for each in ends)
        assert equal(end.result["values"], wanted["values"])
        assert [end.result[each] for each in ("steps", "rate", "score")] == [
            wanted[each] for each in ("steps", "rate", "score")
        ]
    assert equal(ends[0].result["losses"], wanted["losses"])
    assert len(ends[0].result["told"]) == 1 and "rank 1" in ends[0].result["told"][0]


def undisturbed(folder: Path, size: int, kind: str = "") -> dict[str, Any]:
    return launch_trainings(size, train, folder, folder, size, "", kind)[0]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), 2)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_spare_replaces_a_lost_process(moment, wanted, tmp_path):
    check(lose(tmp_path, 2, moment), wanted)


def test_a_changed_copy_changes_the_result(wanted, tmp_path):
    ends = lose(tmp_path, 2, "forward", "changed copy")
    assert not equal(ends[0].result["values"], wanted["values"])
    assert equal(ends[0].result["values"], ends[2].result["values"])


@pytest.mark.parametrize("kind, moment", [("accumulated", "validation"), ("uncaptured", "update")])
def test_three_processes(kind, moment, tmp_path):
    check(lose(tmp_path / "lost", 3, moment, kind), undisturbed(tmp_path / "undisturbed", 3, kind))


@pytest.mark.parametrize("kind, lost", [("dead spare", 1), ("rank 0", 0)])
def test_without_a_spare_the_run_ends_with_its_error(kind, lost, tmp_path):
    """The other process names the lost rank, and a spare that waits ends."""
    ends = run_ranks(3, train, tmp_path, tmp_path, 2, "forward", kind, joined=False)
    assert ends[lost].exitcode == -signal.SIGKILL and ends[2].exitcode == 0
    assert f"The first process to fail was rank {lost}: it ended without an error" in ends[1 - lost].said


@pytest.mark.parametrize("kind, words", [
    ("sharded", "only if every process has all weights"),
    ("validates", "which must be fit, but it is validate"),
])  # fmt: skip
def test_refusals(kind, words, tmp_path):
    for end in run_ranks(3, train, tmp_path, tmp_path, 2, "", kind, joined=False)[:2]:
        assert words in end.said
