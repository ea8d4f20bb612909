"""When one process fails, all others end soon and say which one was the first."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.processes.failure import SILENT
from tests.distributed.processes import LIMIT, Ended, run_ranks
from tests.distributed.shared_memory import POSSIBLE
from tests.strategy import failing
from tests.strategy.scenarios import popen


def run(kind: str, folder: Path) -> list[Ended]:
    return run_ranks(2, failing.train, folder, kind, joined=False)


def launched(*kind: str) -> tuple[int, str]:
    """Run a training that Lightning's launcher starts: its return code and its output.

    None of its processes is left, because the output ends when the last of them does.
    """
    running = popen([sys.executable, failing.__file__, *kind])
    try:
        said, _ = running.communicate(timeout=LIMIT.total_seconds())
    finally:
        running.kill()
    return running.returncode, said


def test_an_error_is_known_to_the_other_process(tmp_path):
    first, second = run("raise on 1", tmp_path)
    assert isinstance(second.result, ValueError) and isinstance(first.result, PiperError)
    assert "rank 1 says: ValueError: something of the user's" in second.said
    assert "The first process to fail was rank 1: ValueError: something of the user's" in first.said
    assert re.search(r"something of the user's, at \S+failing\.py:\d+ \(raise ValueError", first.said)
    assert "rank 0 says: ExecutionError: The first process to fail was rank 1: ValueError" in first.said
    assert re.search("^device 0: .+ failed: ", first.said, re.MULTILINE)
    assert str(first.result).startswith(
        "The first process to fail was rank 1: ValueError: something of the user's, at "
    )


def test_an_error_of_the_lead_is_known_to_the_other_process(tmp_path):
    first, second = run("raise on 0", tmp_path)
    assert isinstance(first.result, ValueError) and isinstance(second.result, PiperError)
    assert "The first process to fail was rank 0: ValueError: something of the user's" in second.said
    assert "rank 1 says: ExecutionError: The first process to fail was rank 0: ValueError" in second.said


def test_an_error_is_known_to_a_replica_that_compares_the_batch(tmp_path):
    """Before the third batch each replica traces its step again, and waits to know if a trace differs."""
    first, _ = run("raise on 1, replicas", tmp_path)
    assert isinstance(first.result, ExecutionError)
    assert str(first.result).startswith(
        "The first process to fail was rank 1: ValueError: something of the user's, at "
    )
    assert re.search("^device 0: the comparison .+ in training batch 2 .+ failed: ", first.said, re.MULTILINE)


def test_an_error_before_the_first_batch_is_known_to_the_other_process(tmp_path):
    """Where no plan waits, but Lightning, or what all agree on: the error is gloo's own, which knows of a
    connection alone.
    """
    first, second = run("begin on 1", tmp_path)
    assert isinstance(second.result, ValueError)
    assert type(first.result) is RuntimeError
    assert str(first.result).startswith(
        "The first process to fail was rank 1: ValueError: something of the user's, at "
    )


def test_a_process_that_dies_ends_the_other(tmp_path):
    survivor, dead = run("die on 1", tmp_path)
    assert dead.exitcode == -signal.SIGKILL
    assert isinstance(survivor.result, PiperError)
    assert (
        "rank 0 says: ExecutionError: The first process to fail was rank 1: it ended without an error message"
        in survivor.said
    )


@pytest.mark.long
def test_a_failed_process_that_lives_on_does_not_keep_the_other_waiting():
    """gloo keeps its connections; so the other one does not notice, and is ended."""
    code, said = launched("live on 0", "over gloo")
    assert code != 0
    assert (
        "rank 1 ends, because it would wait forever: the first process to fail was rank 0: ValueError" in said
    )


@pytest.mark.long
@pytest.mark.skipif(not POSSIBLE, reason="processes of this machine cannot share memory, and take gloo")
def test_a_failed_process_that_lives_on_closes_its_pipes():
    code, said = launched("live on 0")
    assert code != 0
    assert "connection closed by rank 0" in said
    assert "The first process to fail was rank 0: ValueError" in said


@pytest.mark.long
def test_a_process_that_hangs_ends_the_other_at_the_timeout(tmp_path):
    _, other = run("hang on 0", tmp_path)
    assert isinstance(other.result, PiperError)
    assert re.search("^device 1: .+ failed: ", other.said, re.MULTILINE)
    assert "rank 1 says: ExecutionError: The first process to fail" in other.said
    assert (
        "The first process to fail was rank 0: it hangs, or takes longer than the timeout of communication: "
        in other.said
    )
    assert re.search(r"failing\.py:\d+, in on_train_batch_start", other.said)


@pytest.mark.long
def test_a_stopped_process_is_named_and_ended():
    code, said = launched("stop on 1")
    assert code not in (0, None)
    assert re.search("^device 0: .+ failed: ", said, re.MULTILINE)
    assert f"rank 0 says: ExecutionError: The first process to fail was rank 1: {SILENT}" in said


@pytest.mark.long
def test_a_process_that_hangs_does_not_outlive_the_one_that_launched_it():
    code, said = launched("die on 0, hang on 1")
    assert code == -signal.SIGKILL
    assert (
        "rank 1 ends, because it would wait forever: the first process to fail was rank 0: it ended without "
        "an error message" in said
    )


def check_left(left: Ended, other: Ended, rank: int, batches: int, why: str) -> None:
    """Check the messages of both ranks after `rank` has left the training loop: both name it as the first to
    fail.
    """
    after = f"{batches} batches ({batches} in its last epoch), because {why}, while rank "
    said = f"rank {rank}: it has left the training loop after {after}"
    assert (
        left.exitcode == 1
        and f"rank {rank} ends, because it would wait forever: the first process to fail was {said}"
        in left.said
    )
    assert isinstance(other.result, PiperError) and f"The first process to fail was {said}" in other.said


def test_a_process_whose_data_end_before_the_others(tmp_path):
    other, left = run("end on 1", tmp_path)
    check_left(left, other, 1, 2, "its data had ended")


def test_a_process_that_stops_before_the_others(tmp_path):
    left, other = run("leave on 0", tmp_path)
    check_left(left, other, 0, 3, "its trainer.should_stop was set")


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_ends_all_processes_before_the_same_batch(rank, tmp_path):
    lead, other = run(f"term on {rank}", tmp_path)
    for ended in (lead, other):
        assert ended.exitcode == 0 and "trained batch 2" in ended.said and "trained batch 3" not in ended.said
    assert f"SIGTERM came to rank {rank}: all processes end before the next batch" in lead.said


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_in_the_first_batch_ends_all_processes(rank, tmp_path):
    for ended in run(f"term at first on {rank}", tmp_path):
        assert ended.exitcode == 1 and "trained batch" not in ended.said
        assert f"SIGTERM came to rank {rank} before a batch was trained" in ended.said


def test_sigterm_while_the_main_thread_waits_ends_all_processes(tmp_path):
    """Python's handlers do not run in a wait for others, and the other one is busy."""
    for ended in run("term while waiting on 0", tmp_path):
        assert ended.exitcode is not None and "trained batch" not in ended.said
        assert "SIGTERM came to rank 0 before a batch was trained" in ended.said


EXIT = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("at exit:", dist.is_initialized()))
import sys
if sys.argv[1] == "own":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(lambda: print("mine:", dist.is_initialized()))
from tests.strategy.failing import train
train(0, "nothing", devices=1)
print("in use:", dist.is_initialized())
"""


@pytest.mark.parametrize(
    "made_by, said",
    [
        ("strategy", ["in use: True", "at exit: False"]),
        pytest.param("own", ["in use: True", "mine: True", "at exit: True"], marks=pytest.mark.long),
    ],
)
def test_groups_of_the_strategy_end_before_the_interpreter(made_by, said):
    running = popen([sys.executable, "-c", EXIT, made_by])
    words, _ = running.communicate(timeout=LIMIT.total_seconds())
    assert (
        running.returncode == 0
        and [line for line in words.splitlines() if re.match("in use|mine|at exit", line)] == said
    ), words


def test_batches_of_other_shapes(tmp_path):
    first, second = run("other shapes", tmp_path)
    assert isinstance(first.result, PiperError) and isinstance(second.result, PiperError)
    assert (
        "rank 1 says: PiperError: the processes drew different batches (different shapes or dtypes) in training "
        "batch 3" in second.said
    )
    assert (
        "The first process to fail was rank 1: PiperError: the processes drew different batches" in first.said
    )
    assert "rank 0 says: " in first.said


def test_batches_of_other_shapes_in_one_replica(tmp_path):
    first, second = run("other shapes of replicas", tmp_path)
    assert isinstance(first.result, PiperError) and isinstance(second.result, PiperError)
    assert (
        "rank 1 says: BatchError: the replicas drew batches that do not fit together in training batch 3 of this "
        "fit (batch[0]: float32[6,8] and float32[8,8]). Give all replicas the same number of samples"
        in second.said
    )
    assert (
        "The first process to fail was rank 1: BatchError: the replicas drew batches that do not fit together"
        in first.said
    )
    assert "rank 0 says: " in first.said
