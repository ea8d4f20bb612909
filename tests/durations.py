"""The recorded duration of each test, and the tests that are `long` because of it, so that `make test` ends
within minutes.

With PIPER_ONE_OF_EACH, as in continuous integration, each test of which all cases are long runs with its
shortest case, if this case takes at most 3 s.

`make durations` records all tests into durations.json: the seconds of a test, and of a fixture that several
tests share. They are processor seconds of this process and of the processes that it has started, because
other work on the machine changes wall-clock seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.seconds import seconds

FILE = Path(__file__).with_name("durations.json")
LIMIT = 0.4  # a test is long if it takes longer than this, or if its shared fixture does
LIMIT_OF_ONE = 3.0  # with PIPER_ONE_OF_EACH, a case that takes longer than this does not run
KEPT = 0.3  # seconds below which a test is not recorded
RECORD = "PIPER_RECORD_DURATIONS"
ONE_OF_EACH = "PIPER_ONE_OF_EACH"

_found: dict[str, float] = {}


def register(config: pytest.Config) -> None:
    """Register the plugin once, although each conftest calls this function."""
    if not config.pluginmanager.is_registered(sys.modules[__name__]):
        config.pluginmanager.register(sys.modules[__name__])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded: dict[str, float] = json.loads(FILE.read_text())
    # A launch counts for the first test that needs it. `groups.marked` decides which tests of a launch are
    # long. If the first quick test of a launch were also long, the quick launch would run twice.
    launched = {
        item.nodeid.partition("[")[0]
        for item in items
        if hasattr(getattr(item, "module", None), "on_demand") and item.get_closest_marker("long")
    }
    for item in items:
        if item.nodeid.partition("[")[0] in launched:
            continue
        if _taken(item, recorded) > LIMIT and not item.get_closest_marker("quick"):
            item.add_marker("long")
    if ONE_OF_EACH in os.environ:
        kept = _one_of_each(items, recorded, launched)
        left = [item for item in items if item not in kept and item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    began = seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _add(_shared(request._pyfuncitem, fixturedef.argname), began)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = seconds()
    try:
        return (yield)
    finally:
        _add(item.nodeid, began)


def pytest_sessionfinish() -> None:
    """Write the durations. Several sessions run at once, and write one after another."""
    if RECORD not in os.environ:
        return
    with FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recorded = {name: seconds for name, seconds in json.load(file).items() if name not in _found}
        recorded |= {name: round(seconds, 1) for name, seconds in _found.items() if seconds >= KEPT}
        file.seek(0)
        file.truncate()
        json.dump(dict(sorted(recorded.items())), file, indent=0)
        file.write("\n")


def _taken(item: pytest.Item, recorded: dict[str, float]) -> float:
    """Return the recorded seconds of a test, or of a fixture that it shares if the fixture took longer.
    Return 0 if nothing is recorded."""
    names = [item.nodeid, *(_shared(item, name) for name in getattr(item, "fixturenames", ()))]
    return max(recorded.get(name, 0.0) for name in names)


def _one_of_each(
    items: list[pytest.Item], recorded: dict[str, float], launched: set[str]
) -> set[pytest.Item]:
    """Return the shortest case of each test of which all cases are long, if this case takes at most
    `LIMIT_OF_ONE`. A case of a launch takes as long as the launch. `launched` has the names of tests with
    launches.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for name, group in cases.items():
        seconds = [_taken(item, recorded) for item in group]
        least = max(seconds) if name in launched else min(seconds)
        if all(item.get_closest_marker("long") for item in group) and least <= LIMIT_OF_ONE:
            kept.add(group[seconds.index(min(seconds))])
    return kept


def _add(name: str, began: float) -> None:
    _found[name] = _found.get(name, 0.0) + seconds() - began


def _shared(item: pytest.Item, fixture: str) -> str:
    return f"{item.nodeid.partition('::')[0]}::fixture {fixture}"
