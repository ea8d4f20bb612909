"""Values that guards do not watch: docs/limits.md lists them. A repeated trace finds each change."""

from __future__ import annotations

import decimal
import logging
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_piper.errors import CaptureError
from tests.capture.test_guards import Module, captured

FACTOR = 2.0


class Settings:
    beta = 2.0


class Unwatched(NamedTuple):
    """A value that a step reads, and a change of it. `row` is the beginning of the row of docs/limits.md."""

    row: str
    read: Callable[[Any], float]
    state: dict[str, Any]
    change: Callable[[Any], object]


def mapped() -> mmap.mmap:
    """Return a map of a file that may only be read. `os.pwrite` changes the file."""
    MAPPED.write(b"\2")
    MAPPED.flush()
    return mmap.mmap(MAPPED.fileno(), 0, access=mmap.ACCESS_READ)


MAPPED = tempfile.TemporaryFile()  # noqa: SIM115


def graph() -> nx.Graph[int]:
    found: nx.Graph[int] = nx.Graph()
    found.add_node(0, weight=2.0)
    return found


def of_objects() -> Any:
    found = np.empty(1, dtype=object)
    found[0] = [1.0]
    return found


OUTSIDE, IN_C = "data outside of Python", "the content of an object whose class is written in C"
OF_LIBRARIES = "attributes of objects whose class is in Python's library"
OF_MODULES, RUN_TIME = "attributes of modules of Python's library", "names made at run time"
CASES = {
    "a file": Unwatched(
        OUTSIDE,
        lambda self: float(Path("factor").read_text()),
        {},
        lambda module: Path("factor").write_text("3"),
    ),
    "a folder": Unwatched(
        OUTSIDE, lambda self: len(os.listdir(".")), {}, lambda module: Path("new").write_text("")
    ),
    "an element": Unwatched(
        IN_C,
        lambda self: float(self.element.get("k", "")),
        {"element": ElementTree.Element("a", k="2")},
        lambda module: module.element.set("k", "3"),
    ),
    "a lock": Unwatched(
        IN_C,
        lambda self: 2.0 if "count=0" in repr(self.lock) else 3.0,
        {"lock": threading.RLock()},
        lambda module: module.lock.acquire(),
    ),
    "a mapped file": Unwatched(
        IN_C,
        lambda self: float(self.mapped[0]),
        {"mapped": mapped()},
        lambda module: os.pwrite(MAPPED.fileno(), b"\3", 0),
    ),
    "a generator": Unwatched(
        IN_C,
        lambda self: float(self.generator.initial_seed()),
        {"generator": torch.Generator()},
        lambda module: module.generator.manual_seed(7),
    ),
    "a handler": Unwatched(
        OF_LIBRARIES,
        lambda self: float(self.handler.level),
        {"handler": logging.StreamHandler()},
        lambda module: module.handler.setLevel(30),
    ),
    "a graph": Unwatched(
        OF_LIBRARIES,
        lambda self: self.graph.nodes[0]["weight"],
        {"graph": graph()},
        lambda module: module.graph.nodes[0].update(weight=3.0),
    ),
    "a setting of a library": Unwatched(
        OF_MODULES,
        lambda self: 2.0 if logging.raiseExceptions else 3.0,
        {},
        lambda module: setattr(logging, "raiseExceptions", not logging.raiseExceptions),
    ),
    "arguments of the program": Unwatched(
        OF_MODULES, lambda self: float(len(sys.argv)), {}, lambda module: sys.argv.append("")
    ),
    "the context of decimals": Unwatched(
        OF_MODULES,
        lambda self: float(Decimal(1) / Decimal(3)),
        {},
        lambda module: setattr(decimal.getcontext(), "prec", 2),
    ),
    "an attribute": Unwatched(
        RUN_TIME,
        lambda self: vars(self)["be" + self.end],
        {"beta": 2.0, "end": "ta"},
        lambda module: setattr(module, "beta", 3.0),
    ),
    "a global": Unwatched(
        RUN_TIME,
        lambda self: globals()["FAC" + self.end],
        {"end": "TOR"},
        lambda module: globals().update(FACTOR=3.0),
    ),
    "an attribute of a class": Unwatched(
        RUN_TIME,
        lambda self: getattr(Settings, "be" + self.end),
        {"end": "ta"},
        lambda module: setattr(Settings, "beta", 3.0),
    ),
    "the order of a set": Unwatched(
        "the order of the items of a set",
        lambda self: float(next(iter(self.items))),
        {"items": {8, 0}},
        lambda module: (module.items.clear(), module.items.update((0, 8))),
    ),
    "an object in an array": Unwatched(
        "objects inside of numpy arrays",
        lambda self: float(len(self.table[0])),
        {"table": of_objects()},
        lambda module: module.table[0].append(1.0),
    ),
}
WATCHED = {
    "an attribute by a name that is made at run time": Unwatched(
        RUN_TIME,
        lambda self: getattr(self, "be" + self.end),
        {"beta": 2.0, "end": "ta"},
        lambda module: setattr(module, "beta", 3.0),
    ),
}


def step_of(case: Unwatched) -> tuple[Any, Any]:
    """Return a module whose step multiplies by what the case reads, and its captured step."""
    read = case.read  # the step names `read` and not `case`, whose code of the change names attributes

    def body(self: Any, x: Tensor) -> Tensor:
        return x * read(self)

    module = Module(body, **case.state)
    return module, captured(module)


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("factor").write_text("2")
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(sys, "argv", ["test"])
    monkeypatch.setattr(Settings, "beta", 2.0)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setattr(decimal.getcontext(), "prec", 28)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_a_second_trace_sees_the_change(case: Unwatched) -> None:
    module, step = step_of(case)
    step.retrace()
    case.change(module)
    assert step.reads.hold()
    with pytest.raises(CaptureError, match="now differs from the captured step"):
        step.retrace()


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_the_exceptions_are_watched(case: Unwatched) -> None:
    module, step = step_of(case)
    assert step.reads.hold()
    case.change(module)
    assert not step.reads.hold()


def test_the_page_has_a_row_for_each_case_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    section = page.split("### Values that guards do not watch")[1].split("\n\nKeep ")[0]
    rows = [line.removeprefix("| ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows and all(any(row.startswith(case.row) for case in CASES.values()) for row in rows)
    assert {case.row for case in CASES.values()} == {
        case.row for case in CASES.values() if any(row.startswith(case.row) for row in rows)
    }
