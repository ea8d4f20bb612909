"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests import profiles

profiles.load()
torch.set_num_threads(1)  # as in all processes that tests start: another number adds up in another order


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage needs to go through it. Captures make many small objects that stay for a
    while, too: collections are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test draws the same random numbers, alone or with others, and leaves the generator as it found it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield
