"""Log directories in which others can write: the tab serves the recordings in them and no other file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client

from lightning_piper.errors import PiperError
from lightning_piper.profile.files import LIMIT, read_json, write_text
from lightning_piper.profile.node_times import when_it_ran
from tests.profile.board import PLUGIN
from tests.profile.page import judged
from tests.profile.recorded import write_large

SECRET = '{"secret": 1}'


class Tab:
    """The tab's server on a log directory, in this process."""

    def __init__(self, logs: Path) -> None:
        from lightning_piper_tensorboard.tab import PiperTab

        tab = PiperTab(SimpleNamespace(logdir=str(logs)))
        tab._scanned = float("inf")  # it reads the disk only when it is asked to
        self.apps = tab.get_plugin_apps()

    def runs(self) -> dict[str, list[int]]:
        found = Client(self.apps["/runs"]).get("/runs").get_json()["runs"]
        return {run["name"]: [step["number"] for step in run["steps"]] for run in found}

    def get(self, run: str, name: str) -> tuple[int, bytes]:
        answer = Client(self.apps["/file"]).get("/file", query_string={"run": run, "name": name})
        return answer.status_code, answer.data


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A log directory with two runs, and a secret file outside of it."""
    for run in ("one", "two"):
        write_large(tmp_path / "logs" / run, 64)
    (tmp_path / "outside" / "piper").mkdir(parents=True)
    (tmp_path / "outside" / "piper" / "step_0.json").write_text(SECRET)
    return tmp_path / "logs"


@pytest.fixture
def tab(logs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tab]:
    monkeypatch.syspath_prepend(str(PLUGIN))
    found = Tab(logs)
    assert found.runs() == {"one": [0], "two": [0]}  # only runs that were listed can be requested
    yield found
    assert found.get("two", "step_0.json")[0] == 200  # the other runs can still be read
    for name in [name for name in sys.modules if name.startswith("lightning_piper_tensorboard")]:
        del sys.modules[name]


def link(path: Path, target: Path) -> None:
    path.rename(path.with_name(path.name + ".moved"))
    path.symlink_to(target)


@pytest.mark.parametrize("below", ["piper/step_0.json", "piper", "."])
def test_a_link_that_comes_after_the_scan_is_not_followed(below: str, tab: Tab, logs: Path) -> None:
    assert tab.get("one", "step_0.json")[0] == 200
    link(logs / "one" / below, logs.parent / "outside" / below)
    status, content = tab.get("one", "step_0.json")
    assert status == 404 and b"secret" not in content
    assert "one" not in tab.runs()  # nor is it listed


def test_what_is_no_file_any_more_does_not_block(tab: Tab, logs: Path) -> None:
    step = logs / "one" / "piper" / "step_0.json"
    step.unlink()
    os.mkfifo(step)
    assert error_of(tab) == "is not a regular file"
    step.unlink()
    step.mkdir()
    assert error_of(tab) == "is not a regular file"
    step.rmdir()
    assert error_of(tab) == "has been deleted"


def test_a_large_file_is_not_read(tab: Tab, logs: Path) -> None:
    os.truncate(logs / "one" / "piper" / "step_0.json", LIMIT)
    assert tab.get("one", "step_0.json")[0] == 200
    os.truncate(logs / "one" / "piper" / "step_0.json", 1500 << 20)
    assert error_of(tab) == f"has {1500 << 20} bytes, more than the {LIMIT} that the tab reads"
    with pytest.raises(PiperError, match=f"a file of a recording may have at most {LIMIT} bytes"):
        read_json(logs / "one" / "piper" / "step_0.json")


def error_of(tab: Tab) -> str:
    status, content = tab.get("one", "step_0.json")
    assert status == 404
    return str(json.loads(content)["error"]).removeprefix("'step_0.json' of run 'one' ")


def test_content_is_served_as_it_is(tab: Tab, logs: Path) -> None:
    """The page judges it; nothing here recurses, or fails at a byte that is no text."""
    for content in (b"[" * 1_000_000, b"\xff\xfe", b'{"a": NaN}', b""):
        (logs / "one" / "piper" / "step_0.json").write_bytes(content)
        assert tab.get("one", "step_0.json") == (200, content)


def test_names_are_data(tab: Tab, logs: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    write_large(logs / name, 64)
    write_large(logs / "two" / "step_1.json", 64)
    (logs / "one" / "piper" / "step_\u0663.json").write_text("{}")
    assert tab.runs() == {name: [0], "one": [0], "two": [0], "two/step_1.json": [0]}
    for run, file in (
        (name, "../plan.json"),
        ("two/..", "plan.json"),
        ("one", "step_\u0663.json"),
        ("one", "step_0.json\n"),
    ):
        status, content = tab.get(run, file)
        assert status == 404 and "there is no recording" in json.loads(content)["error"]


def test_a_log_directory_may_be_a_link(tab: Tab, logs: Path) -> None:
    logs.with_name("linked").symlink_to(logs)
    found = Tab(logs.with_name("linked"))
    assert found.runs() == {"one": [0], "two": [0]} and found.get("one", "plan.json")[0] == 200


# What the page checks before it draws


def changed(content: dict[str, Any], path: str, value: Any) -> str:
    copy = json.loads(json.dumps(content))
    *owners, last = path.split(".")
    owner = copy
    for name in owners:
        owner = owner[int(name) if isinstance(owner, list) else name]
    owner[int(last) if isinstance(owner, list) else last] = value
    return json.dumps(copy)


INFINITE = "@1e999"  # JSON that JavaScript reads as Infinity

STEPS: list[tuple[str, Any]] = [
    ("version", 2), ("plan", 5), ("plan", None), ("number", "<b>"), ("step", None), ("step.step_time", "1"),
    ("step.boxes", {}),
    ("step.boxes.0.0", 99), ("step.boxes.0.0", "length"), ("step.boxes.0.1", INFINITE),
    ("step.boxes.0.2", -1),
    ("step.boxes.0.3", "constructor"), ("step.boxes.0.3", 10**30), ("step.boxes.0.4", None),
    ("step.boxes.0", [1]),
    ("step.devices", []), ("step.devices.0", None), ("step.devices.0.busy", None),
    ("step.devices.0.memory_by_kind", 3),
    ("step.devices.0.memory_by_kind.x", [[0]]), ("step.directives", None),
    ("step.directives", [{"directive": 7}]), ("fixed", 3),
]  # fmt: skip
PLANS: list[tuple[str, Any]] = [
    ("nodes", []), ("nodes.0", None), ("nodes.0.label", {}), ("nodes.0.tags", None), ("nodes.0.devices", "0"),
    ("nodes.0.origin", 5),
    ("rows", None), ("rows.0", 1), ("colors.F", "url(http://elsewhere)"), ("colors", None),
    ("edges", [[0, 10**6, 1, None]]),
    ("edges", [[0, 1]]), ("directives", None), ("step", {}), ("version", None),
]  # fmt: skip


def test_the_page_draws_only_what_is_a_recording(tmp_path: Path) -> None:
    write_large(tmp_path, 64)
    record, plan = (
        json.loads((tmp_path / "piper" / f"{name}.json").read_text()) for name in ("step_0", "plan")
    )
    pairs = [(json.dumps(record), json.dumps(plan))]
    pairs += [(changed(record, *change), json.dumps(plan)) for change in STEPS]
    pairs += [(json.dumps(record), changed(plan, *change)) for change in PLANS]
    pairs += [("[" * 100_000 + "]" * 100_000, json.dumps(plan)), ('{"a": NaN}', json.dumps(plan)), ("", "")]
    pairs = [(text.replace(f'"{INFINITE}"', INFINITE[1:]), other) for text, other in pairs]
    said = judged(pairs, tmp_path)
    assert len(said) == len(pairs) and said[0] == "drawn"
    assert "drawn" not in said[1:]
    ours = said[1 : 1 + len(STEPS) + len(PLANS)]
    assert all("this is not a valid recording" in line for line in ours), ours


# The command line


@pytest.mark.parametrize(
    "content, text",
    [
        ('{"version": 1, "plan": "../../../outside/piper/step_0.json"}', "not a file in the same folder"),
        ('{"version": 1, "plan": 3}', "not a valid recording"),
        ('{"version": 1}', "not a valid recording"),
        ("[" * 100_000, "cannot be read as a recording"),
        ("1" * 5000, "cannot be read as a recording"),
    ],
)
def test_explain_reads_recordings_only(content: str, text: str, logs: Path) -> None:
    (logs / "one" / "piper" / "step_0.json").write_text(content)
    nothing: Any = None
    with pytest.raises(PiperError, match=text) as error:
        when_it_ran(nothing, 0, logs / "one")
    assert "secret" not in str(error.value)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def outside(path: Path) -> None:
    link(path, path.parents[3] / "outside" / "piper" / "step_0.json")


@pytest.mark.parametrize("change, text", [(fifo, "is not a regular file"), (outside, "is a link")])
def test_explain_reads_files_only(change: Callable[[Path], None], text: str, logs: Path) -> None:
    change(logs / "one" / "piper" / "step_0.json")
    with pytest.raises(PiperError, match=text):
        read_json(logs / "one" / "piper" / "step_0.json")


def test_a_recording_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / f".plan.json.{os.getpid()}").symlink_to(tmp_path / "target")
    (tmp_path / "plan.json").symlink_to(tmp_path / "target")
    write_text(tmp_path / "plan.json", "new")
    assert (tmp_path / "target").read_text() == "kept"
    assert (tmp_path / "plan.json").read_text() == "new" and not (tmp_path / "plan.json").is_symlink()
