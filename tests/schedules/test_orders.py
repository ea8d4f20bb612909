"""Compares the builders, action by action, with the orders of torch.distributed.pipelining and with orders
written by hand.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest

from lightning_piper.directives import Order, Place, Split, parse, to_json
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules import (
    dualpipe,
    dualpipev,
    interleaved_one_f_one_b,
    to_csv,
    v_half,
    v_min,
    zb_h2,
    zbv,
    zero_bubble,
)
from tests.schedules.torch_schedules import cells, schedule


def rows(program: Any) -> list[list[str]]:
    return list(csv.reader(io.StringIO(to_csv(program))))


@pytest.mark.parametrize(("ranks", "local"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2), (8, 2), (3, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_interleaved_is_torchs(ranks: int, local: int, rounds: int) -> None:
    for microbatches in {ranks * rounds, (ranks + 1) * rounds, *([max(1, ranks - 1)] if rounds == 1 else [])}:
        if microbatches % max(1, microbatches // ranks):
            continue
        expected = schedule("ScheduleInterleaved1F1B", ranks * local, microbatches, local).pipeline_order
        assert rows(interleaved_one_f_one_b(ranks * local, microbatches, local)) == cells(expected)


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16, 33])
def test_zbv_is_torchs(stages: int, microbatches: int) -> None:
    assert rows(zbv(stages, microbatches)) == cells(
        schedule("ScheduleZBVZeroBubble", stages, microbatches).pipeline_order
    )


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("more", [0, 1, 2, 7, 20])
def test_dualpipev_is_torchs(stages: int, more: int) -> None:
    expected = schedule("ScheduleDualPipeV", stages, stages + more).pipeline_order
    assert rows(dualpipev(stages, stages + more)) == cells(expected)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 24])
def test_zero_bubble_is_torchs_interleaved_one_with_one_stage_a_rank(stages: int, microbatches: int) -> None:
    expected = schedule("ScheduleInterleavedZeroBubble", stages, microbatches, 1).pipeline_order
    assert rows(zero_bubble(stages, microbatches)) == cells(expected)


def test_zero_bubble_written_out() -> None:
    assert [" ".join(row) for row in rows(zero_bubble(3, 4))] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2_written_out() -> None:
    assert [" ".join(row) for row in rows(zb_h2(2, 4))] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize("builder", [zb_h2, v_half, v_min])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 9, 12])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 13, 24])
def test_each_pass_is_there_once_and_the_ranks_wait_for_no_circle(
    builder: Callable[..., Any], ranks: int, microbatches: int
) -> None:
    stages = ranks * (1 if builder is zb_h2 else 2)
    found = [[parse_cell(cell) for cell in row] for row in rows(builder(stages, microbatches))]
    everything = {
        (s, kind, mb) for s in range(stages) for kind in ("F", "I", "W") for mb in range(microbatches)
    }
    assert sorted(action for row in found for action in row) == sorted(everything)
    assert {(r, s) for r, row in enumerate(found) for s, _, _ in row} == {
        (r, s) for r in range(ranks) for s in ({r} if builder is zb_h2 else {r, stages - 1 - r})
    }
    assert not undone(found, stages)
    found[0].reverse()  # the control: backward passes before their forward passes
    assert undone(found, stages)


def parse_cell(cell: str) -> tuple[int, str, int]:
    kind = next(c for c in cell if c.isalpha())
    stage, mb = map(int, cell.split(kind))
    return stage, kind, mb


def undone(rows: list[list[tuple[int, str, int]]], stages: int) -> int:
    """How many actions never run if each rank runs its row in order, and waits for the actions whose results
    it reads.
    """
    done: set[tuple[int, str, int]] = set()
    position = [0] * len(rows)

    def ready(s: int, kind: str, mb: int) -> bool:
        sources = {"F": [(s - 1, "F", mb)], "I": [(s, "F", mb), (s + 1, "I", mb)], "W": [(s, "I", mb)]}[kind]
        return all(source in done for source in sources if 0 <= source[0] < stages)

    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while position[r] < len(row) and ready(*row[position[r]]):
                done.add(row[position[r]])
                position[r] += 1
                moved = True
    return sum(map(len, rows)) - len(done)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 14), (8, 16), (8, 22)])
def test_dualpipe_is_two_dualpipev_that_share_their_ranks(stages: int, microbatches: int) -> None:
    """Rank r < stages / 2 does what rank r of DualPipeV does with half of the microbatches: its stage of the
    way down is that of the first half, its stage of the way up is that of the second half. The other ranks
    mirror it.
    """
    half = microbatches // 2
    found = rows(dualpipe(stages, microbatches))
    for rank, row in enumerate(rows(dualpipev(stages, half))):
        for mirrored, line in ((False, row), (True, row)):

            def moved(cell: str, mirrored: bool = mirrored, rank: int = rank) -> str:
                if cell.startswith("("):
                    return f"({';'.join(map(moved, cell[1:-12].split(';')))})OVERLAP_F_B"
                kind = next(c for c in cell if c.isalpha())
                stage, number = map(int, cell.split(kind))
                return f"{stage}{kind}{number + half * ((stage != rank) != mirrored)}"

            assert found[stages - 1 - rank if mirrored else rank] == [moved(cell) for cell in line]


def test_dualpipe_places_each_stage_on_two_ranks() -> None:
    program = dualpipe(4, 8)
    first, second = list(range(4)), list(range(4, 8))
    assert program[0] == Split(filter={}, dim_name="MB", num_microbatches=8)
    assert program[1:9] == [
        Place(filter={"PP": stage, "MB": part}, devices=[device])
        for stage in range(4)
        for device, part in sorted([(stage, first), (3 - stage, second)])
    ]
    assert [type(directive) for directive in program[9:]] == [Order] * 4


@pytest.mark.parametrize(
    "builder", [zero_bubble, zb_h2, interleaved_one_f_one_b, zbv, v_half, v_min, dualpipev, dualpipe]
)
def test_programs_are_json_and_devices_and_tags_are_the_users(builder: Callable[..., Any]) -> None:
    program = builder(4, 8)
    assert parse(to_json(program)) == program
    ranks = len(rows(program))
    moved = builder(
        4, 8, devices=[[r, r + ranks] for r in reversed(range(ranks))], tag="STAGE", dim_name="UB"
    )
    assert rows(program)[::-1] == list(csv.reader(io.StringIO(to_csv(moved, tag="STAGE", dim_name="UB"))))
    with pytest.raises(
        DirectiveError,
        match=rf"^{builder.__name__}: devices=\[0\] does not fit {ranks} ranks. Give one device, or one group",
    ):
        builder(4, 8, devices=[0])


@pytest.mark.parametrize(
    ("builder", "arguments", "says"),
    [
        (interleaved_one_f_one_b, (5, 8), "5 stages, 2 on each rank. Give a multiple of 2 stages"),
        (
            interleaved_one_f_one_b,
            (4, 5),
            "5 microbatches on 2 ranks cannot run in 2 rounds of equal size. Give 4 microbatches",
        ),
        (interleaved_one_f_one_b, (4, 4, 0), "stages_per_device=0. Give an integer >= 1"),
        (zbv, (3, 8), "3 stages, 2 on each rank. Give a multiple of 2 stages"),
        (v_half, (3, 8), "3 stages, 2 on each rank. Give a multiple of 2 stages"),
        (v_min, (1, 8), "1 stage, 2 on each rank. Give a multiple of 2 stages"),
        (v_min, (True, 8), "stages=True. Give an integer >= 1"),
        (zb_h2, (2, -1), "microbatches=-1. Give an integer >= 1"),
        (dualpipev, (3, 8), "3 stages, 2 on each rank. Give a multiple of 2 stages"),
        (dualpipev, (4, 3), "3 microbatches for 4 stages. Give at least 4"),
        (dualpipe, (3, 8), "3 stages, 2 on each rank. Give a multiple of 2 stages"),
        (
            dualpipe,
            (4, 6),
            "6 microbatches for 4 stages. Give an even number of microbatches, at least 8",
        ),
        (dualpipe, (4, 9), "9 microbatches for 4 stages. Give an even number"),
        (zero_bubble, (2, 0), "microbatches=0. Give an integer >= 1"),
    ],
)
def test_wrong_arguments_state_the_condition(
    builder: Callable[..., Any], arguments: tuple[int, ...], says: str
) -> None:
    with pytest.raises(DirectiveError, match=f"^{builder.__name__}: {says}"):
        builder(*arguments)
