"""A step is not captured if it changes files, starts programs or threads, or uses connections, queues and open files
whose changes cannot be undone."""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import gzip
import hashlib
import io
import itertools
import logging
import mmap
import os
import queue
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import remove
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch import save as torch_save

from lightning_piper.capture import capture
from lightning_piper.capture.python_state.rollback import rollback_on_failure
from lightning_piper.errors import CaptureError


def appends(folder: Path) -> None:
    with open(folder / "texts", "a") as file:
        file.write("text\n")


def writes(folder: Path) -> None:
    (folder / "texts").write_text("text")


def saves(folder: Path) -> None:
    torch.save({"losses": [1.0]}, folder / "texts")


def saves_as_long_ago(folder: Path) -> None:
    torch_save(1.0, str(folder / "texts"), _use_new_zipfile_serialization=False)


def saves_array(folder: Path) -> None:
    np.save(folder / "texts.npy", np.ones(2))
    (folder / "texts.npy").rename(folder / "texts")


def saves_arrays(folder: Path) -> None:
    np.savez(folder / "texts.npz", np.ones(2))
    (folder / "texts.npz").rename(folder / "texts")


def saves_text(folder: Path) -> None:
    np.savetxt(folder / "texts", np.ones(2))


def saves_table(folder: Path) -> None:
    pytest.importorskip("pandas").DataFrame({"loss": [1.0]}).to_csv(folder / "texts")


def touches(folder: Path) -> None:
    (folder / "texts").touch()


def opens_by_number(folder: Path) -> None:
    os.close(os.open(folder / "texts", os.O_WRONLY | os.O_CREAT))


def makes_folder(folder: Path) -> None:
    os.makedirs(folder / "texts")


def runs_program(folder: Path) -> None:
    subprocess.run(["touch", str(folder / "texts")], check=True)


def makes_pipe(folder: Path) -> None:
    os.mkfifo(folder / "texts")


def removes_by_own_name(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove(folder / "other")
    (folder / "texts").touch()


def writes_in_a_thread(folder: Path) -> None:
    thread = threading.Thread(target=writes, args=(folder,))
    thread.start()
    thread.join()


def opens_database(folder: Path) -> None:
    with sqlite3.connect(folder / "texts") as database:
        database.execute("CREATE TABLE t (x)")
    database.close()


def saves_as_a_package(folder: Path) -> None:
    """A package may write into a hidden folder only if it is a folder of caches."""
    hidden = folder / ".texts"
    exec(compile(f"open({str(hidden)!r}, 'w').close()", "/x/site-packages/package.py", "exec"), {})
    hidden.rename(folder / "texts")


def makes_database_in_memory(folder: Path) -> None:
    sqlite3.connect(":memory:").close()


def saves_to_memory(folder: Path) -> None:
    torch.save([1.0], io.BytesIO())
    np.save(io.BytesIO(), np.ones(2))
    torch.save([1.0], os.devnull)


def reads(folder: Path) -> None:
    with open(__file__) as file:
        assert file.read()


def discards(folder: Path) -> None:
    with open(os.devnull, "w") as file:
        file.write("text")


def makes_folder_again(folder: Path) -> None:
    os.makedirs(folder, exist_ok=True)


def caches(folder: Path) -> None:
    """As a package does when it is first used. The code of a package is one that Python finds installed."""
    hidden = Path.home() / ".cache_of_package"
    exec(compile(f"open({str(hidden)!r}, 'w').close()", "/x/site-packages/package.py", "exec"), {})


def logs(folder: Path) -> None:
    logger = logging.getLogger("lightning_piper.tests.opened")
    handler = logging.FileHandler(folder / "log", delay=True)
    logger.addHandler(handler)
    logger.warning("text")
    logger.removeHandler(handler)
    handler.close()


class Writer(L.LightningModule):
    def __init__(self, write: Callable[[Path], None], folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.write, self.folder = write, folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.folder)
        return self.layer(batch).mean()


ACTIONS = {
    makes_folder: "makes a folder",
    runs_program: "starts a program",
    touches: "changes the attributes of a file",
    makes_pipe: "makes a file",
    removes_by_own_name: "removes a file",
    writes_in_a_thread: "starts a thread",
    opens_database: "opens a database",
}


@pytest.mark.parametrize(
    "write",
    [
        appends,
        writes,
        saves,
        saves_as_long_ago,
        saves_array,
        saves_arrays,
        saves_text,
        saves_table,
        touches,
        opens_by_number,
        makes_folder,
        runs_program,
        makes_pipe,
        removes_by_own_name,
        writes_in_a_thread,
        opens_database,
        saves_as_a_package,
    ],
)
def test_a_step_that_writes_a_file_is_refused(write: Any, tmp_path: Path) -> None:
    action = ACTIONS.get(write, "opens a file")
    with pytest.raises(CaptureError, match=rf"test_effects.py:\d+ .*training_step {action}"):
        capture(Writer(write, tmp_path), torch.ones(4, 4)).at(4)
    assert not any(tmp_path.iterdir())
    write(tmp_path)  # outside of a capture
    assert (tmp_path / "texts").exists()


@pytest.mark.parametrize(
    "use",
    [reads, discards, logs, saves_to_memory, makes_folder_again, caches, makes_database_in_memory],
)
def test_a_step_that_writes_no_file_of_its_own_is_captured(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert capture(Writer(use, tmp_path), torch.ones(4, 4)).at(4).regions


class Copies(torch.autograd.Function):
    """Calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


class Backwards(Writer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def call() -> None:
            self.write(self.folder)

        loss = self.layer(batch).mean()
        if self.hooked:
            loss.register_hook(lambda gradient: call())
            return loss
        return Copies.apply(loss, call)

    hooked = False


@pytest.mark.parametrize("hooked", [True, False])
def test_a_backward_pass_that_writes_a_file_is_refused(hooked: bool, tmp_path: Path) -> None:
    module = Backwards(appends, tmp_path)
    module.hooked = hooked
    with pytest.raises(CaptureError, match=r"test_effects.py:\d+ .*training_step opens a file"):
        capture(module, torch.ones(4, 4)).at(4)
    assert not any(tmp_path.iterdir())
    module.write = reads
    assert capture(module, torch.ones(4, 4)).at(4).regions


class Reporter(L.LightningModule):
    """Has a file, and a function that a step calls with it."""

    def __init__(self, file: Any, report: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.file, self.table, self.report = file, csv.writer(file), report

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.report(self)
        return self.layer(batch).mean()


REPORTS: dict[str, Callable[[Any], Any]] = {
    "write": lambda module: module.file.write("1,2\n"),
    "print": lambda module: print("1,2", file=module.file),
    "writelines": lambda module: module.file.writelines(["1", ",2", "\n"]),
    "csv": lambda module: module.table.writerow([1, 2]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_step_that_writes_into_an_open_file_is_refused_and_the_file_is_as_before(
    name: str, tmp_path: Path
) -> None:
    with open(tmp_path / "report.csv", "w") as file:
        file.write("header\n")
        module = Reporter(file, REPORTS[name])
        with (
            pytest.raises(CaptureError, match=r"training_step changes self\.(file|table)"),
            rollback_on_failure(module),
        ):
            capture(module, torch.ones(4, 4)).at(4)
        file.write("end\n")
    assert (tmp_path / "report.csv").read_text() == "header\nend\n"


@pytest.mark.parametrize("ask", [lambda module: None, lambda module: bool(module.file)])
def test_a_step_that_has_an_open_file_and_writes_nothing_is_captured(ask: Any, tmp_path: Path) -> None:
    with open(tmp_path / "report.csv", "w") as file:
        module = Reporter(file, ask)
        found = capture(module, torch.ones(4, 4))
        assert found.at(4).regions and found.reads.hold()
        file.write("a hook may write between steps")
        assert found.reads.hold()
        asks = ask(module) is not None
        module.file = None
        assert found.reads.hold() is not asks


READS: dict[str, Callable[[Any], Any]] = {
    "characters": lambda module: module.file.read(2),
    "a line": lambda module: module.file.readline(),
    "in a loop": lambda module: next(module.file),
    "through a method": lambda module: module.table(2),
}


@pytest.mark.parametrize("mode", ["r", "rb", "r+", "a+"])
@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_on_in_an_open_file_is_refused_and_the_file_is_as_before(
    name: str, mode: str, tmp_path: Path
) -> None:
    path, text = tmp_path / "factors", "12\n34\n56\n78\n"
    path.write_text(text)
    with open(path, mode) as file:
        file.seek(3)
        module = Reporter(file, READS[name])
        module.table = file.read
        with (
            pytest.raises(CaptureError, match=r"training_step changes self\.(file|table)"),
            rollback_on_failure(module),
        ):
            capture(module, torch.ones(4, 4)).at(4)
        assert file.tell() == 3
    assert path.read_text() == text


def test_a_step_that_has_an_open_file_and_reads_nothing_is_captured(tmp_path: Path) -> None:
    (tmp_path / "factors").write_text("12\n34\n")
    with open(tmp_path / "factors") as file:
        module = Reporter(file, lambda module: bool(module.file))
        found = capture(module, torch.ones(4, 4))
        assert found.at(4).regions
        file.readline()  # a hook may read between steps
        assert found.reads.hold()


class Slots:
    __slots__ = ("file",)

    def __init__(self, file: Any) -> None:
        self.file = file


# Objects through which a step may write into a file, without a read of the file itself
BEHIND: dict[str, Callable[[Any], Any]] = {
    "DictWriter": lambda file: csv.DictWriter(file, ["a", "b"]).writerow,
    "method": lambda file: lambda row, write=file.write: write(f"{row}"),
    "codecs": lambda file: codecs.getwriter("utf-8")(file.buffer).write,
    "partial": lambda file: functools.partial(print, file=file),
    "slots": lambda file: Slots(file),
}


def report_behind(module: Any) -> None:
    if isinstance(module.table, Slots):
        module.table.file.write("row")
    else:
        module.table({"a": 1, "b": 2} if "DictWriter" in repr(module.table) else "row")


@pytest.mark.parametrize("name", BEHIND)
def test_a_step_that_writes_through_another_object_is_refused_and_the_file_is_as_before(
    name: str, tmp_path: Path
) -> None:
    with open(tmp_path / "report.csv", "w") as file:
        file.write("header\n")
        file.flush()
        module = Reporter(io.StringIO(), report_behind)
        module.table = BEHIND[name](file)
        with (
            pytest.raises(CaptureError, match="training_step changes "),
            rollback_on_failure(module),
        ):
            capture(module, torch.ones(4, 4)).at(4)
        file.write("end\n")
    assert (tmp_path / "report.csv").read_text() == "header\nend\n"


def test_a_hook_may_write_through_another_object_between_steps(tmp_path: Path) -> None:
    with open(tmp_path / "report.csv", "w") as file:
        module = Reporter(file, lambda module: bool(module.table))
        module.table = csv.DictWriter(file, ["a"])
        found = capture(module, torch.ones(4, 4))
        assert found.at(4).regions
        module.table.writerow({"a": 1})
        assert found.reads.hold()
        assert found.at(8).regions
        module.table = csv.DictWriter(file, ["b"])
        assert not found.reads.hold()


def test_a_step_that_prints_is_captured() -> None:
    assert capture(Reporter(sys.stdout, lambda module: print("text")), torch.ones(4, 4)).at(4).regions


@pytest.mark.parametrize(
    "print_by", [lambda file: file.write, lambda file: functools.partial(print, file=file)]
)
def test_a_step_that_prints_through_another_object_is_captured(
    print_by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard output may be a file on a disk (`python train.py > train.log`)."""
    with open(tmp_path / "train.log", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        module = Reporter(io.StringIO(), lambda module: (module.table("text"), file.flush()))
        module.table = print_by(file)
        assert capture(module, torch.ones(4, 4)).at(4).regions
        monkeypatch.undo()
    assert "text" in (tmp_path / "train.log").read_text()


def pipe() -> Any:
    """Return the end of a pipe to write into, which closes the other end when it is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


def database() -> sqlite3.Connection:
    found = sqlite3.connect(":memory:")
    found.execute("CREATE TABLE t (x)")
    return found


def insert(found: Any) -> None:
    found.execute("INSERT INTO t VALUES (1)")


# Name -> (function that makes an object, function that changes something outside of Python's objects through it)
OUTSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "compressed": (lambda: gzip.GzipFile(fileobj=io.BytesIO(), mode="w"), lambda file: file.write(b"x")),
    "compressed text": (
        lambda: io.TextIOWrapper(gzip.GzipFile(fileobj=io.BytesIO(), mode="w")),  # type: ignore[arg-type]
        lambda file: file.write("x"),
    ),
    "pipe": (pipe, lambda file: file.write("x")),
    "database": (database, insert),
    "cursor": (lambda: database().cursor(), insert),
    "method": (lambda: database().execute, lambda execute: execute("INSERT INTO t VALUES (1)")),
    "list": (lambda: [database()], lambda found: insert(found[0])),
    "queue": (queue.Queue, lambda waiting: waiting.put(1)),
    "queue in C": (queue.SimpleQueue, lambda waiting: waiting.put(1)),
    "threads": (lambda: ThreadPoolExecutor(1), lambda pool: pool.submit(int)),
    "connection": (lambda: socket.socketpair()[0], lambda end: end.fileno()),
    "mapped file": (lambda: mmap.mmap(-1, 8), lambda file: file.write(b"x")),
    "bits": (lambda: np.random.PCG64(1), lambda bits: bits.random_raw()),
    "hash": (hashlib.sha256, lambda found: found.update(b"x")),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_step_that_uses_what_cannot_be_undone_is_refused(name: str) -> None:
    make, change = OUTSIDE[name]
    module = Reporter(io.StringIO(), lambda module: change(module.table))
    module.table = make()
    with (
        pytest.raises(
            CaptureError, match=r"the step uses self.table, which is or has an object of .*PIPER-C003"
        ),
        rollback_on_failure(module),
    ):
        capture(module, torch.ones(4, 4)).at(4)
    module.report = lambda module: None
    assert capture(module, torch.ones(4, 4)).at(4).regions


class Shared:
    """An iterator of the user's own class, whose position is an attribute."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        return self.position


ITERATORS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle([0, 1]),
    "generator": lambda: (x for x in range(2)),
    "matches": lambda: re.finditer(r"\d", "01"),
    "rows": lambda: csv.reader(["0", "1"]),
    "deque": lambda: iter(deque([0, 1])),
    "pairs": lambda: itertools.pairwise([0, 1, 2]),
    "array": lambda: np.arange(2).flat,
    "loader": lambda: iter(torch.utils.data.DataLoader([0, 1])),  # type: ignore[arg-type]
    "method": lambda: itertools.count().__next__,
}


@pytest.mark.parametrize("name", ITERATORS)
def test_a_step_that_reads_an_iterator_is_refused_before_it_takes_a_value(name: str) -> None:
    def taken(found: Any) -> Any:
        return found() if name == "method" else next(found)

    module, first = Reporter(io.StringIO(), lambda module: taken(module.table)), taken(ITERATORS[name]())
    module.table = ITERATORS[name]()
    with (
        pytest.raises(CaptureError, match=r"takes the next value of the iterator self\.table") as caught,
        rollback_on_failure(module),
    ):
        capture(module, torch.ones(4, 4)).at(4)
    assert not caught.value.late and str(taken(module.table)) == str(first)


def test_a_step_may_read_an_iterator_of_the_users_own_class() -> None:
    module = Reporter(io.StringIO(), lambda module: next(module.table))
    module.table = Shared()
    with rollback_on_failure(module):
        assert capture(module, torch.ones(4, 4)).at(4).regions


def test_a_file_that_a_step_was_refused_for_has_no_bytes_of_it() -> None:
    content = io.BytesIO()
    file = gzip.GzipFile(fileobj=content, mode="w")
    file.write(b"header\n")
    module = Reporter(io.StringIO(), lambda module: module.table.write(b"row\n"))
    module.table = file
    with pytest.raises(CaptureError), rollback_on_failure(module):
        capture(module, torch.ones(4, 4)).at(4)
    file.close()
    assert gzip.decompress(content.getvalue()) == b"header\n"
