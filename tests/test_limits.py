"""What is too large, no file, or no plain JSON is refused before time and memory are spent on it."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.common import limits
from lightning_piper.directives import parse, to_json
from lightning_piper.simulate import Link, read_durations

PLACE = '{"op": "place", "filter": {"PP": 0}, "devices": [0]'

# Limit in processor seconds, also for a slow processor. Most cases need milliseconds. Without the checks they
# would need far more.
SECONDS = 10.0


def soon(call: Callable[[], object], says: str) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(piper.PiperError, match=says) as raised:
        call()
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 2**10  # in KiB
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(("content", "says"), [
    (b"", "Expecting value"),
    (b"[" * 10**6, "nested too deeply"),
    (f'[{PLACE}, "devices": [1]}}]'.encode(), "the key 'devices' is given twice in one object"),
    (b'[{"op": "replicate", "bucket_size": NaN}]', "NaN is not a number in JSON"),
    (b'[{"op": "replicate", "bucket_size": -Infinity}]', "-Infinity is not a number in JSON"),
    (b'[{"op": "replicate", "bucket_size": 1e400}]', "the number 1e400 is too large"),
    (b"[" + b"9" * 10**5 + b"]", "Exceeds the limit"),
    (b"[\xff]", "utf-8"),
])  # fmt: skip
def test_files_that_are_no_plain_json(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_bytes(content)
    soon(lambda: parse(path), f"cannot be read as JSON: .*{says}")
    soon(lambda: read_durations(path), f"cannot be read as JSON: .*{says}")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_bytes(b"\xef\xbb\xbf" + f"[{PLACE}}}]".encode())
    assert to_json(parse(path)) == json.loads(f"[{PLACE}}}]")


@pytest.mark.parametrize("read", [parse, read_durations, schedules.from_csv])
def test_what_is_no_file_or_too_large(read: Callable[[Any], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**30)
    soon(lambda: read(tmp_path / "pipe"), "it is a pipe or a device. Give a file")
    soon(lambda: read("/dev/zero"), "it is a pipe or a device. Give a file")
    soon(lambda: read(tmp_path), "it is a directory")
    soon(
        lambda: read(tmp_path / "large"), f"it has {2**30} bytes. Give a file of at most {limits.FILE} bytes"
    )
    soon(lambda: read("\0"), "cannot be read")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: schedules.gpipe(2, 10**9), "microbatches=1000000000. Give at most 50000"),
        (
            lambda: schedules.v_min(1000, 1000),
            "1,000 stages with 1,000 microbatches. Give at most 100 microbatches, because a step has at most 200000 passes",
        ),
        (
            lambda: schedules.zbv(1000, 1000),
            "1,000 stages with 1,000 microbatches. Give at most 100 microbatches, because a step has at most 200000 passes",
        ),
        (lambda: schedules.from_csv("999999999F999999999,0F0\n"), "stage 0, microbatch 0 has 0F0"),
        (lambda: schedules.from_csv("9" * 5000 + "F0,\n"), "is not an action"),
        (lambda: schedules.from_csv("0F0," + "x" * 200_000), "cannot be read as CSV"),
        (
            lambda: schedules.one_f_one_b(2, 4, devices=2),
            r"devices=2 is not a list. Give one device >= 0, or one group of "
            r"devices, for each rank",
        ),
        (lambda: schedules.one_f_one_b(2, 4, devices="01"), "devices='01' is not a list. Give one device"),
        (lambda: schedules.one_f_one_b(2, 4, devices=[[0], [[1]]]), r"has \[\[1\]\] for rank 1. Give one"),
        (lambda: schedules.one_f_one_b(2, 4, tag="MB"), "tag and dim_name are both 'MB'"),
        (lambda: schedules.one_f_one_b(None, 4), "stages=None. Give an integer >= 1"),
        (lambda: parse([piper.Place(filter={}, devices=[0])] * 10_001), "at most 10000 directives"),
        (
            lambda: parse([piper.Split(filter={}, dim_name="MB", num_microbatches=10**9)]),
            "Give at most 100000",
        ),
        (lambda: parse([piper.Place(filter={"PP": 10**5000}, devices=[0])]), "an int that cannot be shown"),
        (lambda: parse([piper.Place(filter={}, devices=[10**6])]), "Give indices below 65536"),
        (
            lambda: parse([piper.ShardExperts(filter={}, devices=[[0, 1], 2])]),
            r"directive 0 \(shard_experts\): field 'devices': 2 is "
            r"not a list",
        ),
        (
            lambda: parse([piper.Replicate(filter={}, devices=[0, 1], bucket_size=float("inf"))]),
            "inf is not a size. Give a number of MB",
        ),
        (lambda: Link(10**400), "latency is a?"),
    ],
)
def test_what_is_odd_or_too_large(call: Callable[[], object], says: str) -> None:
    soon(call, says)


def test_the_number_that_a_schedule_names_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_piper.schedules.actions.PASSES", 200)
    for counts, what, most in (
        ((2, 999), "microbatches", 50),
        ((999, 4), "stages", 25),
        ((999, 0), "stages", 100),
    ):
        with pytest.raises(piper.DirectiveError, match=f"{what}=999. Give at most {most}, because"):
            schedules.gpipe(*counts)
    assert len(schedules.gpipe(2, 50)) == 5
    assert len(schedules.gpipe(25, 4)) == 51
    with pytest.raises(
        piper.DirectiveError, match=r"2 stages with 51 microbatches\. Give at most 50 microbatches"
    ):
        schedules.gpipe(2, 51)


def test_integers_of_numpy_are_integers() -> None:
    assert schedules.gpipe(np.int64(2), np.int8(4), devices=[np.int64(0), np.int32(1)]) == schedules.gpipe(
        2, 4
    )
    program = [
        piper.Place(filter={"PP": np.int64(0)}, devices=(np.int64(1),)),
        piper.Split(filter={}, dim_name="MB", num_microbatches=np.int8(2)),
    ]
    assert json.loads(json.dumps(to_json(parse(program)))) == to_json(program)
    assert piper.Schedule(wait=np.int64(3)) == piper.Schedule(wait=3)


def test_programs_of_a_reasonable_size_are_accepted() -> None:
    assert len(schedules.gpipe(64, 1024)) == 64 + 1 + 64
