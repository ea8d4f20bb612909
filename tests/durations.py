"""How long each test takes, as it was recorded, and which tests are `long` because of that: `make test` is to
end within minutes.

With PIPER_ONE_OF_EACH, as in continuous integration, each test of which all cases are long runs with one case: the
one that takes least, if that is at most 6 s.

`make durations` records all tests into durations.json: the seconds of a test, and of a fixture that several
tests share. They are seconds of processors, of this process and those that it has started, because other work
on the machine changes all others.
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
LIMIT = 0.5  # a test that takes longer is long, or one with a shared fixture that does
LIMIT_OF_ONE = 6.0  # a case that takes longer is not run then
KEPT = 0.3  # what takes less is not written
RECORD = "PIPER_RECORD_DURATIONS"
ONE_OF_EACH = "PIPER_ONE_OF_EACH"

_found: dict[str, float] = {}


def register(config: pytest.Config) -> None:
    """Once, by each conftest."""
    if not config.pluginmanager.is_registered(sys.modules[__name__]):
        config.pluginmanager.register(sys.modules[__name__])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded: dict[str, float] = json.loads(FILE.read_text())
    # A launch counts for the first test that asks for it. Which tests of a launch are long is said by
    # `groups.marked`: if the first of the others were also long, their launch would run twice.
    launched = {
        item.nodeid.partition("[")[0]
        for item in items
        if hasattr(getattr(item, "module", None), "on_demand") and item.get_closest_marker("long")
    }
    for item in items:
        if item.nodeid.partition("[")[0] in launched:
            continue
        if _taken(item, recorded) > LIMIT:
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
    """Several sessions run at once, and write one after another."""
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
    """The seconds that were recorded of a test, or of a shared fixture of it that took longer."""
    names = [item.nodeid, *(_shared(item, name) for name in getattr(item, "fixturenames", ()))]
    return max(recorded.get(name, 0.0) for name in names)


def _one_of_each(
    items: list[pytest.Item], recorded: dict[str, float], launched: set[str]
) -> set[pytest.Item]:
    """The case that takes least of each test of which all cases are long. One of a launch takes what the launch
    takes.
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
