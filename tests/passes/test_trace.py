"""The counts of a trace agree with `diff`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lightning_piper.directives import Order, parse
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.metrics import StepReport
from lightning_piper.ops.order import Barrier
from lightning_piper.passes import Pass, run_passes, run_pipeline
from lightning_piper.passes.trace import PassTrace
from lightning_piper.schedules import one_f_one_b
from tests.models import captured


def counted(trace: PassTrace) -> list[tuple[str, int, int, int]]:
    return [(change.done.by.title, change.added, change.changed, change.removed) for change in trace.changes]


def differing(a: Path, b: Path) -> tuple[int, int]:
    """Return the numbers of lines that only one of two files has."""
    mine, other = (set(path.read_text().splitlines()) for path in (a, b))
    return len(mine - other), len(other - mine)


def test_each_kind_of_change(tmp_path: Path) -> None:
    def move(dag: TrainingDAG) -> None:
        dag.change(next(dag.of_type(Chunk)), stream="side")

    def exchange(dag: TrainingDAG) -> None:
        dag.remove([next(dag.of_type(StepReport))])
        dag.add(Barrier())
        dag.add(Barrier())

    def wait(dag: TrainingDAG) -> None:
        first, second = list(dag.of_type(Barrier))
        dag.order(second, first, 5)

    def circle(dag: TrainingDAG) -> None:
        first, second = list(dag.of_type(Barrier))
        dag.order(first, second, 6)

    trace = PassTrace(tmp_path / "a" / "b")
    capture = run_pipeline(captured("mlp").step, [], after=trace)
    size = len(capture.nodes)
    trace.changes.clear()
    run_passes(
        capture, [Pass(each.__name__, "bitwise", each) for each in (move, exchange, wait, circle)], trace
    )
    assert counted(trace) == [
        ("move", 0, 1, 0),
        ("exchange", 2, 0, 1),
        ("wait", 0, 1, 0),
        ("circle", 0, 1, 0),
    ]
    files = [
        tmp_path / "a" / "b" / f"0{i}-{name}.txt"
        for i, name in enumerate(("move", "exchange", "wait", "circle"))
    ]
    assert [len(file.read_text().splitlines()) for file in files] == [1 + size, 2 + size, 2 + size, 2 + size]
    assert [differing(a, b) for a, b in itertools.pairwise(files)] == [(1, 2), (1, 1), (1, 1)]


def test_a_program_in_a_folder(tmp_path: Path) -> None:
    """An order of 1F1B changes a line for each chunk that waits, wherever a topological order of the graph
    would have it.
    """
    trace = PassTrace(tmp_path)
    dag = run_pipeline(captured("mlp").step, one_f_one_b(2, 4), after=trace)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "00-capture.txt",
        "01-place.txt",
        "02-place.txt",
        "03-split.txt",
        "04-order.txt",
        "05-order.txt",
        "06-complete.txt",
        "07-eliminate-communication.txt",
    ]
    assert [
        file.name for file, change in zip(files, trace.changes, strict=True) if change.done.by.name == "order"
    ] == ["04-order.txt", "05-order.txt"]
    for i, change in enumerate(trace.changes[4:6], start=4):
        assert differing(files[i - 1], files[i]) == (7, 7) and (
            change.added,
            change.changed,
            change.removed,
        ) == (0, 7, 0)
    assert files[-1].read_text() == files[5].read_text(), "nothing to complete, and no communication to drop"
    *_, last = files[-1].read_text().splitlines()
    assert last.startswith(f"%{max(dag.nodes)} ")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    class Odd(Order):
        op = "a/../b\n" + 300 * "c"

    program = [Odd(filters=[{"PP": 0, "PASS": "F"}, {"PP": 0, "PASS": "B"}])]
    run_pipeline(captured("mlp").step, program, after=PassTrace(tmp_path))
    assert [file.name[:12] for file in sorted(tmp_path.iterdir())[:2]] == ["00-capture.t", "01-a-..-b-cc"]


def test_only_what_a_trace_wrote_is_removed(tmp_path: Path) -> None:
    run_pipeline(captured("mlp").step, parse([]), after=PassTrace(tmp_path))
    written = sorted(file.name for file in tmp_path.iterdir())
    (tmp_path / "01-notes.txt").write_text("training step of my own\n")
    with pytest.raises(
        PiperError, match=r"contains 01-notes.txt, which is not a dump of passes. Give a new or empty folder"
    ):
        PassTrace(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*written, "01-notes.txt"])
    (tmp_path / "01-notes.txt").unlink()
    PassTrace(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(PiperError, match=r"is a file. Give a folder"):
        (tmp_path / "file").write_text("")
        PassTrace(tmp_path / "file")
    with pytest.raises(PiperError, match=r"file/inside' cannot be written: Not a directory"):
        PassTrace(tmp_path / "file" / "inside")
