"""Hides Lightning's own warnings, since these tests do on purpose much that Lightning warns about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import processes
from tests.strategy.sharded_jobs import folder, sharded_ranks

__all__ = ["folder", "sharded_ranks"]

if processes.TRACES_BEFORE_FORKS:
    processes.IMPORTS.append("tests.strategy.traced")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(r"ignore:::lightning\.(fabric|pytorch)\."))
