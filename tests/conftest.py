"""Fixtures and settings of all tests."""

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
os.environ[CACHE] = tempfile.mkdtemp()  # tests do not write into the user's cache
atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
# As in all processes that tests start, because another number of threads adds up in another order.
torch.set_num_threads(1)

pytest_configure = durations.register
pytest_ignore_collect, pytest_sessionfinish = changed.pytest_ignore_collect, changed.pytest_sessionfinish


def pytest_collection_finish() -> None:
    """Freeze what was imported, so that garbage collections need not visit it. Captures make many small
    objects that live for a while, so collections are also rarer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Give every test the same random numbers, alone or with other tests, and restore the generator's state."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield
