"""A fit that loses a process goes on with a spare, and ends with the same bits as an undisturbed fit."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import LIMIT, Ended, launch_trainings, run_ranks
from tests.strategy import series, spared_by_torchrun
from tests.strategy.scenarios import equal, popen
from tests.strategy.spared import (
    ALONG_AXES,
    LOST_IN,
    MOMENTS,
    RESULTS,
    WARM,
    Loss,
    train,
    train_again,
    train_along_axes,
)


def lose(folder: Path, size: int, moment: str, kind: str = "") -> list[Ended]:
    """Train with one spare, and lose the last rank."""
    ends = run_ranks(size + 1, train, folder, folder, size, moment, kind, joined=False)
    assert ends[size - 1].exitcode == -signal.SIGKILL, ends[size - 1].said[-3000:]
    return ends


def check(ends: list[Ended], wanted: dict[str, Any]) -> None:
    """Check that all processes of the training except the lost one end like an undisturbed training."""
    lost = len(ends) - 2
    for end in (*ends[:lost], ends[-1]):
        assert isinstance(end.result, dict), "\n".join(each.said[-3000:] for each in ends)
        assert equal(end.result["values"], wanted["values"])
        assert [end.result[each] for each in RESULTS] == [wanted[each] for each in RESULTS]
    assert equal(ends[0].result["losses"], wanted["losses"])
    assert len(ends[0].result["told"]) == 1 and f"lost ranks [{lost}]" in ends[0].result["told"][0]


def undisturbed(folder: Path, size: int, kind: str = "") -> list[dict[str, Any]]:
    return launch_trainings(size, train, folder, folder, size, "", kind)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), 2)[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_spare_replaces_a_lost_process(moment, wanted, tmp_path):
    check(lose(tmp_path, 2, moment), wanted)


@pytest.mark.parametrize("moment", ["forward", "validation"])
def test_batches_since_the_last_copy_run_again(moment, wanted, tmp_path):
    ends = lose(tmp_path, 2, moment, "rare copies")
    check(ends, wanted)
    assert f"before batch {LOST_IN - 1}" in ends[0].result["told"][0], "the first batch of the epoch"


def test_files_since_the_last_copy_are_written_again(tmp_path):
    """`ModelCheckpoint` gives no file another name because the file is newer than the copies."""
    kind = "saved by rare copies"
    wanted = undisturbed(tmp_path / "undisturbed", 2, kind)[0]
    ends = lose(tmp_path / "lost", 2, "validation", kind)
    check(ends, wanted)
    assert ends[0].result["files"] == wanted["files"] and f"step={LOST_IN}.ckpt" in wanted["files"]


def test_a_changed_copy_changes_the_result(wanted, tmp_path):
    ends = lose(tmp_path, 2, "forward", "changed copy")
    assert not equal(ends[0].result["values"], wanted["values"])
    assert equal(ends[0].result["values"], ends[2].result["values"])


@pytest.mark.parametrize("moment, kind", [
    ("validation", "no metrics"), ("update", "no sums"), ("update", "other random numbers"), ("update", "no gradients"),
])  # fmt: skip
def test_state_that_is_not_restored_changes_the_result(moment, kind, wanted, tmp_path):
    if kind == "no gradients":
        wanted = undisturbed(tmp_path / "undisturbed", 2, "manual")[0]
    result = lose(tmp_path / "lost", 2, moment, kind)[0].result
    assert not equal(result["values"], wanted["values"]) or result["logged"] != wanted["logged"]


@pytest.mark.parametrize("kind, moment", [
    ("accumulated", "validation"), ("uncaptured", "update"), ("unfreezes", "update"),
    ("averages", "update"), ("averages converted", "update"), ("accumulates later", "update"), ("replicas scaled", "update"),
])  # fmt: skip
def test_three_processes(kind, moment, tmp_path):
    check(lose(tmp_path / "lost", 3, moment, kind), undisturbed(tmp_path / "undisturbed", 3, kind)[0])


@pytest.mark.parametrize("kind, size, moment", [
    ("zero1", 2, "validation"), ("zero2", 2, "update"), ("zero3", 2, "forward"), ("stages", 2, "forward"),
    ("stages frozen", 2, "forward"),
    ("stages of replicas", 4, "update"),
])  # fmt: skip
def test_a_spare_gets_shards_and_stages(kind, size, moment, tmp_path):
    """Only the lost process had its shards, or its stage."""
    check(lose(tmp_path / "lost", size, moment, kind), undisturbed(tmp_path / "undisturbed", size, kind)[0])


@pytest.mark.parametrize("name", ALONG_AXES)
def test_a_spare_gets_parts_along_axes(name, tmp_path):
    """Processes have parts of tensors and sequences, or of experts."""
    wanted = launch_trainings(4, train_along_axes, tmp_path, tmp_path, name, [])[0]
    lost = [Loss(3, "update")]
    ends = run_ranks(5, train_along_axes, tmp_path / "lost", tmp_path / "lost", name, lost, joined=False)
    assert ends[3].exitcode == -signal.SIGKILL, ends[3].said[-3000:]
    for end in (*ends[:3], ends[4]):
        assert isinstance(end.result, dict) and equal(end.result["values"], wanted["values"]), end.said[
            -3000:
        ]


@pytest.fixture(scope="module")
def of_three(tmp_path_factory) -> dict[str, Any]:
    return series.undisturbed(tmp_path_factory.mktemp("undisturbed"), "replicas", 3)


@pytest.mark.parametrize("ranks, moment, after", [
    ((1, 2), "update", None), ((1, 2), "connecting", 0), ((2, 2), "connecting", 0),
])  # fmt: skip
def test_several_processes_are_lost(ranks, moment, after, of_three, tmp_path):
    """Two processes are lost at once, or the second one before the processes have connected again."""
    losses = [Loss(ranks[0], "update"), Loss(ranks[1], moment, position=0, after=after)]
    assert series.suffer(tmp_path, "replicas", 3, losses, of_three) == (2, [])


def test_two_losses_and_one_spare(of_three, tmp_path):
    """The run ends with its error."""
    losses = [Loss(1, "update"), Loss(2, "update")]
    lost, wrong = series.suffer(tmp_path, "replicas", 3, losses, of_three, spares=1)
    assert lost == 2 and any("The first process to fail was rank" in each for each in wrong)
    assert not any("hangs" in each for each in wrong)


@pytest.mark.parametrize("seed", [1])
def test_a_process_is_lost_in_any_call(seed, tmp_path):
    """Rank 2 is lost in a call of a Python function, from the second batch to the end of the fit."""
    wanted = undisturbed(tmp_path / "undisturbed", 3)
    call = random.Random(seed).randrange(1, wanted[2]["calls"])
    check(lose(tmp_path / "lost", 3, str(call)), wanted[0])


@pytest.mark.parametrize("kind", ["warm", "warm otherwise"])
def test_captures_are_used_again(kind, wanted, tmp_path):
    """The spare has captured the step before. All processes capture it again if its module was another one then."""
    (tmp_path / "lost").mkdir()
    os.mkfifo(tmp_path / "lost" / WARM)
    ends = lose(tmp_path / "lost", 2, "update", kind)
    check(ends, wanted)
    last = kind == "warm"
    assert (ends[0].result["reused"], ends[2].result["reused"]) == ([False, last], [False, last])


def test_two_optimizers_of_a_manual_step(tmp_path):
    wanted = undisturbed(tmp_path / "undisturbed", 2, "manual")[0]
    check(lose(tmp_path / "lost", 2, "update", "manual"), wanted)


@pytest.mark.parametrize("signaled", ["SIGINT", "SIGTERM"])
def test_signals_end_all_processes(signaled, tmp_path):
    """SIGINT comes to all processes, as with Ctrl-C, and SIGTERM to rank 0."""
    ends = run_ranks(3, train, tmp_path, tmp_path, 2, "forward", signaled, joined=False)
    assert all(end.exitcode is not None and not isinstance(end.result, dict) for end in ends), ends


@pytest.mark.parametrize("kind, lost", [("dead spare", 1), ("rank 0", 0)])
def test_without_a_spare_the_run_ends_with_its_error(kind, lost, tmp_path):
    """The other process names the lost rank, and a spare that waits ends."""
    ends = run_ranks(3, train, tmp_path, tmp_path, 2, "forward", kind, joined=False)
    assert ends[lost].exitcode == -signal.SIGKILL and ends[2].exitcode == 0
    assert f"The first process to fail was rank {lost}: it ended without an error" in ends[1 - lost].said


@pytest.mark.parametrize("kind, words", [
    ("uncaptured zero1", "state of an uncaptured step is sharded"),
    ("validates", "which must be fit, but it is validate"),
    ("stochastic averages", "does not support StochasticWeightAveraging"),
])  # fmt: skip
def test_refusals(kind, words, tmp_path):
    for end in run_ranks(3, train, tmp_path, tmp_path, 2, "", kind, joined=False)[:2]:
        assert words in end.said


def test_a_trainer_fits_again(tmp_path):
    """All fits use the process groups of the first. A store that another fit makes ends at once on rank 0, and the
    others would wait for it."""
    ends = run_ranks(2 + 1, train_again, tmp_path, tmp_path, 2, joined=False)
    assert [end.result for end in ends[:2]] == [1, 1], [end.said[-3000:] for end in ends]


def test_torchrun_starts_one_process(tmp_path):
    """A spare replaces rank 1, and torchrun starts all processes again after it has lost rank 0."""
    alone, _ = launch_trainings(2, spared_by_torchrun.undisturbed, tmp_path / "alone", tmp_path / "alone")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    command = [
        sys.executable,
        *torchrun,
        "--monitor-interval=0.1",
        spared_by_torchrun.__file__,
        str(tmp_path),
    ]
    run = popen(command, GLOO_SOCKET_IFNAME="lo")
    try:
        said, _ = run.communicate(timeout=LIMIT.total_seconds())
    finally:
        run.kill()
    assert run.returncode == 0 and "lost ranks [1]" in said, said[-8000:]
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert found["attempt"] == 1 and equal(found["values"], alone)
