"""Hypothesis profiles: `ci` (default: the same examples each time, inside `make test`) and `deep` (`make property-tests`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None, suppress_health_check=slow)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
torch.set_num_threads(1)

counts: Counter[str] = Counter()


@pytest.fixture(scope="session")
def tally() -> Iterator[Counter[str]]:
    """Counts what the examples were: shown at the end of the run."""
    yield counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts:
        terminalreporter.write_sep("-", "property tests")
        for name, number in sorted(counts.items()):
            terminalreporter.write_line(f"{number:6} {name}")
