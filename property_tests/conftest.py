"""What property tests share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from lightning_piper.cache import CACHE
from tests import changed, durations, profiles

profiles.load()
torch.set_num_threads(1)

pytest_configure = durations.register
pytest_ignore_collect, pytest_sessionfinish = changed.pytest_ignore_collect, changed.pytest_sessionfinish
counts: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def nothing_kept() -> Iterator[None]:
    """What is seeded into the package is no change of its files, by which a graph that is kept is known.
    Other tests that run with these keep theirs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, os.devnull)
        yield


@pytest.fixture(scope="session")
def tally() -> Iterator[Counter[str]]:
    """Counts what the examples were: shown at the end of the run."""
    yield counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts:
        terminalreporter.write_sep("-", "property tests")
        for name, number in sorted(counts.items()):
            terminalreporter.write_line(f"{number:6} {name}")
