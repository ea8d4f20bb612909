"""Prints the table of seeded bugs at the end of the run."""

from __future__ import annotations

import pytest

from property_tests.mutations.harness import Caught, summary

FOUND: dict[str, Caught] = {}


@pytest.fixture(scope="session")
def found() -> dict[str, Caught]:
    """Who caught which mutation; the tests fill it."""
    return FOUND


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FOUND:
        terminalreporter.write_sep("-", "seeded bugs")
        for line in summary(FOUND):
            terminalreporter.write_line(line)
