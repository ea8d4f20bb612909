"""Messages between processes of one machine go through memory and have the same content as with gloo."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from lightning_piper.runtime.same_machine.shared_blocks import NAME, SharedBlocks
from tests.distributed import shared_memory as work
from tests.distributed.processes import launch

pytestmark = pytest.mark.skipif(
    not work.POSSIBLE, reason="processes of this machine cannot share memory, and take gloo"
)


@pytest.mark.parametrize("wait_alike", [False, True])
def test_sums_are_added_in_the_order_of_the_members(tmp_path: Path, wait_alike: bool) -> None:
    found = launch(work.SIZE, work.sums, tmp_path, wait_alike)
    cases = [(dtype, numel) for dtype in work.DTYPES for numel in work.sizes(dtype)]
    reordered = 0
    for (dtype, numel), ranks in zip(cases, zip(*found, strict=True), strict=True):
        parts = [work.values(rank, dtype, numel) for rank in range(work.SIZE)]
        for x in ranks:
            assert torch.equal(x, parts[2] + parts[0] + parts[1]), (dtype, numel)
        reordered += not torch.equal(ranks[0], parts[0] + parts[1] + parts[2])
    assert reordered, "in another order the bits would be others"


def test_what_others_read_in_place_is_not_copied_nor_changed(tmp_path: Path) -> None:
    found = launch(work.SIZE, work.sums_in_place, tmp_path, False)
    for dtype, ranks in zip(work.DTYPES, zip(*found, strict=True), strict=True):
        parts = [work.values(rank, dtype, work.sizes(dtype)[-1]) for rank in range(work.SIZE)]
        for (total, x, same_place, blocks), part in zip(ranks, parts, strict=True):
            assert torch.equal(total, parts[2] + parts[0] + parts[1]), dtype
            assert torch.equal(x, part) and not same_place
            assert blocks == 1, "for the sum alone"


def test_the_sum_takes_the_place_of_the_terms_if_all_members_wait_alike(tmp_path: Path) -> None:
    found = launch(work.SIZE, work.sums_in_place, tmp_path, True)
    for dtype, ranks in zip(work.DTYPES, zip(*found, strict=True), strict=True):
        parts = [work.values(rank, dtype, work.sizes(dtype)[-1]) for rank in range(work.SIZE)]
        for total, x, same_place, blocks in ranks:
            assert torch.equal(total, parts[2] + parts[0] + parts[1]), dtype
            assert torch.equal(x, total) and same_place and blocks == 0


def test_a_part_that_is_sent_again_is_copied(tmp_path: Path) -> None:
    for first, second, rank in launch(work.SIZE, work.parts_in_place, tmp_path):
        others = [other for other in range(work.SIZE) if other != rank]
        for turn, rooms in enumerate((first, second)):
            for room, other in zip(rooms, others, strict=True):
                assert torch.equal(room, torch.full_like(room, rank + 10 * other + 100 * turn))


def test_memory_is_lent_again_when_nothing_lies_there_and_all_have_read_it(tmp_path: Path) -> None:
    assert launch(work.SIZE, work.lent_again, tmp_path) == [[False, False, True]] * work.SIZE


def test_parts_arrive_where_they_belong(tmp_path: Path) -> None:
    for rank, (apart, same) in enumerate(launch(work.SIZE, work.exchanges, tmp_path)):
        own = work.ORDER.index(rank)
        for i in range(work.SIZE):
            if i != own:
                assert torch.equal(apart[i], torch.full_like(apart[i], 10.0 * i + own))
                assert torch.equal(same[i], torch.full_like(same[i], float(i)))


def test_memory_is_used_again(tmp_path: Path) -> None:
    for ends, last in launch(work.SIZE, work.growth, tmp_path):
        assert ends[2:] == [ends[2]] * 10, "what the first rounds needed is enough for all others"
        assert ends[0] > 8 * 70_000
        parts = [work.values(rank, torch.float64, 81_000) for rank in range(work.SIZE)]
        assert torch.equal(last, parts[2] + parts[0] + parts[1])


def test_memory_is_given_back(tmp_path: Path) -> None:
    for first, closed, again, end in launch(work.SIZE, work.given_back, tmp_path):
        assert min(first, again) >= 4 * 2**20
        assert closed < first and end < again


@pytest.mark.parametrize("kind, name", [
    ("one machine", "SharedMessages"),
    ("another machine", "Messages"),
    ("no memory", "Messages"),
    ("no pipes", "Messages"),
    ("another file", "Messages"),
    ("files of few bytes", "Messages"),
])  # fmt: skip
def test_all_members_agree_on_how_messages_travel(kind: str, name: str, tmp_path: Path) -> None:
    assert launch(work.SIZE, work.reach, tmp_path, kind) == [name] * work.SIZE


def test_no_memory_for_a_message_is_said(tmp_path: Path) -> None:
    for said in launch(work.SIZE, work.full, tmp_path):
        assert said.startswith("this process cannot get shared memory for a message of 16777216 bytes (")


def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    first, gone, last = launch(work.SIZE, work.broken, tmp_path)
    assert gone == ""
    for said in (first, last):
        assert said.startswith(
            "a message between processes is incomplete, because its shared memory was trunc"
        )


def test_memory_that_is_lent_takes_no_descriptors_and_is_mapped_no_longer_than_it_is_used() -> None:
    def counted() -> tuple[int, int]:
        ranges = [
            line.split()[0].split("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if NAME in line
        ]
        return len(os.listdir("/proc/self/fd")), sum(int(end, 16) - int(start, 16) for start, end in ranges)

    blocks = SharedBlocks()
    descriptors, mapped = counted()
    lent = [blocks.empty(100, torch.float64).fill_(float(i)) for i in range(50)]
    assert counted() == (descriptors, mapped + 50 * mmap.PAGESIZE)
    del blocks  # what lies there still is there
    assert all(x.eq(i).all() for i, x in enumerate(lent))
    assert counted()[1] == mapped + 50 * mmap.PAGESIZE
    del lent
    gc.collect()
    assert counted()[1] == mapped
