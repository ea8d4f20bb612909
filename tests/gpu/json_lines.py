"""A plugin of pytest (`-p tests.gpu.json_lines`) that prints a JSON object for each test when it ends, so that
the results of a run that is stopped are known.
"""

from __future__ import annotations

import json

import pytest

_config: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    _config.append(config)


def row_of(report: pytest.TestReport) -> dict[str, object] | None:
    """The row of a phase of a test: of its call, or of a setup or teardown that failed or was skipped."""
    if report.when != "call" and report.outcome == "passed":
        return None
    said = ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        said = report.longrepr[2].removeprefix("Skipped: ")
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(report.longrepr if crash is None else crash.message)
    name = report.nodeid.rpartition("::")[2]
    return {
        "name": name,
        "outcome": report.outcome,
        "seconds": report.duration,
        "said": said.splitlines()[0] if said else "",
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = row_of(report)
    reporter = _config[-1].pluginmanager.get_plugin("terminalreporter")
    if row is not None and reporter is not None:
        reporter.write_line("\n" + json.dumps(row))  # pytest's dots are on the line before
