"""Copies in memory that processes share: all processes read the latest copies that all of them have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_piper.checkpoint.memory_copy import MemoryCopies
from lightning_piper.checkpoint.sharded_checkpoint import read_whole
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.errors import PiperError

KEY, SIZE = "state_dict.weight", 6


class Rank:
    """One of two processes, which has one half of a tensor."""

    def __init__(self, rank: int, files: list[tuple[int, int]]) -> None:
        self.rank, self.lost = rank, False
        self.copies = MemoryCopies(files, lambda: self.lost)

    def keep(self, number: int, held: int = SIZE // 2) -> None:
        elements = torch.full((held,), float(10 * number + self.rank), dtype=torch.float64)
        start = self.rank * SIZE // 2
        part = TensorRange(KEY, (SIZE,), start, start + held, elements)
        self.copies.is_due(number)
        self.copies.keep(self.rank, {"batch": torch.tensor(number), "rank": self.rank}, [part], number, ())
        self.copies.wait()
        elements.zero_()

    def taken(self) -> tuple[int, int, list[float]]:
        opened = self.copies.take(self.rank)
        return int(opened.common["batch"]), opened.common["rank"], read_whole(opened, [KEY])[KEY].tolist()


@pytest.fixture
def files() -> Iterator[list[tuple[int, int]]]:
    files = [(os.memfd_create("one"), os.memfd_create("other")) for _ in range(2)]
    yield files
    for file in (file for pair in files for file in pair):
        os.close(file)


@pytest.fixture
def ranks(files) -> list[Rank]:
    return [Rank(rank, files) for rank in range(2)]


def wanted(number: int) -> list[float]:
    return [10.0 * number] * 3 + [10.0 * number + 1] * 3


def test_all_processes_read_the_copies_that_all_of_them_have(ranks):
    assert ranks[0].copies.number == -1
    for number in (1, 2, 3):
        for rank in ranks:
            rank.keep(number)
    ranks[0].keep(4)
    assert [rank.copies.number for rank in ranks] == [3, 3]
    assert [rank.taken() for rank in ranks] == [(3, 0, wanted(3)), (3, 1, wanted(3))]
    for rank in ranks:
        rank.copies.continue_on([0, 1])
        rank.keep(4)
    assert [rank.taken() for rank in ranks] == [(4, 0, wanted(4)), (4, 1, wanted(4))]


def test_a_spare_takes_the_copies_of_a_lost_process_and_goes_on(ranks, files):
    for rank in ranks:
        rank.keep(1)
    spare = Rank(1, files)
    assert spare.taken() == (1, 1, wanted(1))
    ranks[0].keep(2)
    spare.keep(2)
    assert ranks[0].taken() == (2, 0, wanted(2))


def test_a_copy_that_a_process_has_begun_is_not_read(ranks):
    for number in (1, 2):
        for rank in ranks:
            rank.keep(number)
    older = min(ranks[1].copies._of_ranks[1], key=lambda copy: copy.number)
    older.write({"batch": torch.tensor(9), "rank": 1}, [], (), 1)
    assert ranks[0].taken() == (2, 0, wanted(2))


def test_a_process_keeps_the_older_copy_until_all_have_the_newer_one(ranks):
    ranks[0].keep(1)
    ranks[1].keep(1)
    ranks[0].keep(2)
    ranks[0].lost = True
    with pytest.raises(RuntimeError, match="a process that is lost"):
        ranks[0].keep(3)
    assert ranks[1].taken() == (1, 1, wanted(1))
    ranks[1].keep(2)
    ranks[0].keep(3)


def test_rank_0_decides_when_all_processes_make_copies(ranks):
    for rank, interval in zip(ranks, (5, 7), strict=True):
        rank.copies._interval = lambda number, interval=interval: interval
    for number in (1, 2):  # the first copy says how many batches are between the second and the third
        for rank in ranks:
            rank.keep(number)
    for rank in ranks:
        assert not rank.copies.is_due(6) and rank.copies.is_due(7)
        rank.copies.continue_on([0, 1])
        assert rank.copies.is_due(1), "after a loss, the next copy is due at once"


@pytest.mark.parametrize("seconds, batches", [(0.01, 1), (0.03, 1), (0.6, 20), (0.61, 21)])
def test_copies_take_a_share_of_the_time(ranks, seconds, batches):
    copies = ranks[0].copies
    copies._begun, copies._checked, copies._seconds = (3, 100.0), 110.0, seconds
    assert copies._interval(13) == batches, "a batch takes a second"


def test_elements_without_a_copy_are_an_error(ranks):
    ranks[0].keep(1)
    ranks[1].keep(1, held=2)
    with pytest.raises(PiperError, match="lack 1 of the elements 0:6"):
        ranks[0].taken()


def test_fewer_processes_read_the_copies_of_a_lost_one_until_they_have_newer_copies(files):
    given = [*files]
    ranks = [Rank(0, given), Rank(1, files)]
    for rank in ranks:
        rank.keep(1)
    ranks[0].keep(2)
    left = ranks[0]
    left.copies.continue_on([0])
    opened = left.copies.take(0)
    assert [(int(read()["batch"]), is_lost) for read, is_lost in opened.others] == [(1, True)]
    assert left.taken() == (1, 0, wanted(1)) and len(given) == 2
    left.keep(2, held=SIZE)
    assert left.copies.number == 2 and left.copies.take(0).others == [] and len(given) == 2
    left.keep(3, held=SIZE)
    assert len(given) == 1 and left.taken() == (3, 0, [30.0] * SIZE)
    with pytest.raises(OSError):
        os.fstat(files.pop()[0])
