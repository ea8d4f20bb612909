"""What recordings on two processes show of a model without annotations: its sums of gradients overlap its
backward pass, and at any time the sharded parameters of two of its blocks at most are gathered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed.shared_memory import POSSIBLE
from tests.profile.overlapped import FITS, LAYERS, Block, record_all
from tests.profile.recorded import plan, steps

BLOCK = sum(p.numel() * p.element_size() for p in Block().parameters())


class Box(NamedTuple):
    start: float
    end: float
    node: int


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("overlapped")
    return folder, record_all(folder)


def of_ranks(run: Path) -> list[tuple[list[Box], list[Box]]]:
    """For each rank in each recorded step, its backward chunks and its sums of buckets."""
    rows = plan(run)["rows"]
    found = []
    for step in steps(run):
        for rank in (0, 1):
            own = [
                (Box(*box[1:4]), box[4], rows[box[0]][1])
                for box in step["step"]["boxes"]
                if rows[box[0]][0] == rank
            ]
            found.append(
                ([b for b, kind, _ in own if kind == "B"], [b for b, _, stream in own if stream == "reduce"])
            )
    return found


def during(chunks: list[Box], total: Box) -> int:
    """How many of the chunks began and ended while the sum was under way."""
    return sum(total.start <= chunk.start and chunk.end <= total.end for chunk in chunks)


@pytest.mark.parametrize("name", ["blocks", "sharded"])
def test_sums_of_blocks_overlap_the_backward_pass(
    recorded: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    """Every sum but the last, which nothing comes after, is on its way while a chunk of the backward pass
    runs.
    """
    found = of_ranks(recorded[0] / name)
    assert len(found) == 4, "of two ranks in two steps"
    for chunks, sums in found:
        assert len(chunks) == len(sums) == LAYERS + 2
        assert [during(chunks, total) > 0 for total in sorted(sums)] == [True] * (LAYERS + 1) + [False]


@pytest.mark.parametrize("name", ["one region", "sharded in one region"])
def test_the_sum_of_one_region_overlaps_nothing(
    recorded: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    for chunks, sums in of_ranks(recorded[0] / name):
        assert len(chunks) == len(sums) == 1 and sums[0].start >= chunks[0].end


@pytest.mark.skipif(not POSSIBLE, reason="processes of this machine cannot share memory")
def test_sums_arrive_while_nobody_waits_for_them(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    """That a sum is on its way from its start to its wait is more than a drawing: what is added is there
    before anybody waits.
    """
    for found in recorded[1]:
        assert found["blocks"] == [LAYERS + 1] * 3, "in each step, all but the last one"


def test_gathered_parameters_are_those_of_two_blocks_at_most(
    recorded: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, held = recorded[0], {}
    for name in FITS:
        devices = [device for step in steps(folder / name) for device in step["step"]["devices"].values()]
        curves = [device["memory_by_kind"]["gathered"] for device in devices]
        held[name] = {max(nbytes for _, nbytes in curve) for curve in curves}
    assert held["blocks"] == held["one region"] == {0}, "nothing is gathered"
    (most,) = held["sharded"]
    buckets = [
        node["bytes"] for node in plan(folder / "sharded")["nodes"].values() if node["kind"] == "allgather"
    ]
    assert max(buckets) < 1.05 * BLOCK and most == 2 * max(buckets)
    (everything,) = held["sharded in one region"]
    assert everything > LAYERS * BLOCK, "of one region, all are there at once"
    for rank in ("0", "1"):
        (beyond,) = {step["fixed"][rank]["parameters"] for step in steps(folder / "sharded")}
        assert beyond == pytest.approx(everything / 2, rel=0.01), "beside the shard"
