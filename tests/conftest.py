"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # as in all processes that tests start: another number adds up in another order


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage needs to go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test draws the same random numbers, alone or with others, and leaves the generator as it found it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield
