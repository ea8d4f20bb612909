"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from lightning_piper.cache import CACHE
from tests import changed, durations, profiles

profiles.load()
os.environ[CACHE] = tempfile.mkdtemp()  # what tests keep is not the user's
atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
torch.set_num_threads(1)  # as in all processes that tests start: another number adds up in another order

pytest_configure = durations.register
pytest_ignore_collect, pytest_sessionfinish = changed.pytest_ignore_collect, changed.pytest_sessionfinish


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage needs to go through it. Captures make many small
    objects that stay for a while, too: collections are rarer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test draws the same random numbers, alone or with others, and leaves the generator as it found
    it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield
