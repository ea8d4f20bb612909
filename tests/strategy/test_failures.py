"""When one process fails, all end soon, and say which one was the first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.strategy.scenarios import start

LIMIT = 60  # seconds; the timeout of communication is 120 seconds, except for a process that hangs


def run(kind):
    began = time.monotonic()
    done = start([sys.executable, str(Path(__file__).with_name("failing.py")), kind], limit=LIMIT)
    assert time.monotonic() - began < LIMIT
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_known_to_the_other_process(rank):
    done = run(f"raise on {rank}")
    assert done.returncode != 0
    assert f"rank {rank} says: ValueError: something of the user's" in done.stdout
    assert f"The first process to fail was rank {rank}: ValueError: something of the user's" in done.stdout
    assert f"rank {1 - rank} says: ExecutionError: device {1 - rank}: " in done.stdout


def test_a_process_that_dies_ends_the_other():
    done = run("die on 1")
    assert done.returncode != 0
    assert "rank 0 says: ExecutionError: device 0: " in done.stdout


def test_a_failed_process_that_lives_on_does_not_keep_the_other_waiting():
    done = run("live on 0")
    assert done.returncode != 0
    assert "rank 1 ends, for it would wait in vain: the first process to fail was rank 0: ValueError" in done.stdout


def test_a_process_that_hangs_ends_the_other_at_the_timeout():
    done = run("hang on 0")
    assert done.returncode != 0
    assert "rank 1 says: ExecutionError: device 1: " in done.stdout


def test_batches_of_other_shapes():
    done = run("other shapes")
    assert done.returncode != 0
    assert "rank 1 says: PiperError: the processes drew different batches (other shapes) in training batch 2" in done.stdout
    assert "The first process to fail was rank 1: PiperError: the processes drew different batches" in done.stdout
    assert "rank 0 says: " in done.stdout


def test_batches_of_other_shapes_in_one_replica():
    done = run("other shapes of replicas")
    assert done.returncode != 0
    assert (
        "rank 1 says: PiperError: the processes drew batches of different shapes in training batch 2 of this fit, but"
        in done.stdout
    )
    assert "The first process to fail was rank 1: PiperError: the processes drew batches of different shapes" in done.stdout
    assert "rank 0 says: " in done.stdout
