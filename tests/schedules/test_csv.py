"""Schedules as CSV files: files of torch.distributed.pipelining can be read, and torch can read the files
that are written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_piper.directives import Order, Place
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules import (
    dualpipe,
    dualpipev,
    from_csv,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    to_csv,
    zbv,
    zero_bubble,
)
from tests.schedules.torch_schedules import cells, schedule

BUILDERS = [gpipe, one_f_one_b, zero_bubble, interleaved_one_f_one_b, zbv, dualpipev, dualpipe]
TORCH = {
    "ScheduleInterleaved1F1B": interleaved_one_f_one_b,
    "ScheduleZBVZeroBubble": zbv,
    "ScheduleDualPipeV": dualpipev,
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_what_is_written_is_read_again(builder: Callable[..., Any], tmp_path: Path) -> None:
    program = builder(4, 8)
    text = to_csv(program, tmp_path / "order.csv")
    for source in (text, tmp_path / "order.csv", str(tmp_path / "order.csv")):
        assert from_csv(source) == program
    groups = [[r, r + 4] for r in range(4)][: len(text.splitlines())]
    assert from_csv(text, groups, "STAGE", "UB") == builder(4, 8, devices=groups, tag="STAGE", dim_name="UB")


@pytest.mark.parametrize("name", TORCH)
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    to_csv(TORCH[name](8, 12), tmp_path / "order.csv")
    theirs = schedule(name, 8, 12)
    theirs.pipeline_order.clear()
    theirs._load_csv(tmp_path / "order.csv", format="compute_only")
    assert cells(theirs.pipeline_order) == cells(schedule(name, 8, 12).pipeline_order)


@pytest.mark.parametrize("name", TORCH)
def test_torchs_files_are_read(name: str, tmp_path: Path) -> None:
    theirs = schedule(name, 8, 12)
    theirs._dump_csv(tmp_path / "compute.csv", format="compute_only")
    assert from_csv(tmp_path / "compute.csv") == TORCH[name](8, 12)
    theirs._dump_csv(tmp_path / "all.csv", format="compute_comms")
    text = (tmp_path / "all.csv").read_text()
    assert all(
        what in text for what in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
    )
    compute = {
        rank: [a for a in row if a is not None and a.is_compute_op]
        for rank, row in theirs.pipeline_order_with_comms.items()
    }
    assert [line.split(",") for line in to_csv(from_csv(text)).splitlines()] == cells(compute)


def test_idle_slots_and_spaces_do_not_matter() -> None:
    assert from_csv(" 0F0 ,,0I0,\n,( 1F0 ; 1B0 )OVERLAP_F_B\n".replace("0I0,", "0I0, 0W0,") + ",\n,,\n")[
        -1
    ] == Order(filters=[{"PP": 0, "MB": 0, "PASS": kind} for kind in ("F", "BI", "BW")])
    program = from_csv("0F0,0B0,1F0,1B0\n")
    assert program[:2] == [Place(filter={"PP": stage}, devices=[0]) for stage in (0, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "0F0,0B0\n1F0,1X0\n",
            r"row 1, cell 1: '1X0' is not an action. Give a stage, F, B, I or W, and a microbatch",
        ),
        ("0F0,(0F1;0B0\n", r"row 0, cell 1: '\(0F1;0B0' is not an action"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", r"row 0, cell 1: .* is not an action"),
        ("0F0,F\n", r"row 0, cell 1: 'F' is not an action"),
        (
            "0F0,0F1,0B1\n",
            r"stage 0, microbatch 0 has 0F0 in row 0. Give F and B, or F, I and W, once each, in one row",
        ),
        ("0F0,0I0\n", r"stage 0, microbatch 0 has 0F0 in row 0, 0I0 in row 0. Give F and B"),
        ("0F0,0B0,0B0\n", r"stage 0, microbatch 0 has 0F0 in row 0, 0B0 in row 0, 0B0 in row 0"),
        ("0F0,\n0B0,\n", r"stage 0, microbatch 0 has 0F0 in row 0, 0B0 in row 1"),
        ("1F0,1B0\n", r"stage 0, microbatch 0 has nothing"),
        ("0F0,0B0\n,\n1F0,1B0\n", r"row 1 has no pass. Remove the row"),
        (",\n", r"the schedule has no pass"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(DirectiveError, match=f"^from_csv: {says}"):
        from_csv(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DirectiveError, match=r"from_csv: file '.*nothing\.csv' cannot be read: "):
        from_csv(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            [Order(filters=[{"PP": 0, "MB": 0}, {"PP": 0, "MB": 1}])],
            r"directive 0 \(order\): .* is not one cell. Give one stage",
        ),
        (
            [Order(filters=[{"PP": 0, "MB": 0, "PASS": "F"}] * 2)],
            r"directive 0 \(order\): .*: 0F0 is on no device",
        ),
        (
            [*gpipe(2, 2), gpipe(2, 2)[-1]],
            r"directive 5 \(order\): .* is the second order for its rank. Give one order for "
            r"each rank",
        ),
        (
            [*gpipe(2, 2)[:3], Order(filters=[{"PP": s, "MB": 0, "PASS": "F"} for s in (0, 1)])],
            r"directive 3 \(order\): .* is for several ranks. Give",
        ),
    ],
)
def test_orders_that_are_no_rows_are_refused(program: Any, says: str) -> None:
    with pytest.raises(DirectiveError, match=f"^to_csv: {says}"):
        to_csv(program)
