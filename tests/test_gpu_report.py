"""The report of `make gpu`: what is read, what is written, what is said where there is no GPU, and a rehearsal
of its parts on a CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightning_piper.testing.simulated import Batch, Values
from tests.gpu import equality, report
from tests.gpu.report import Budget, Part, Report, Row, parts, row_of, run_parts, table, write

CPU = torch.device("cpu")
SYSTEMS = [
    {"name": "Lightning", "ms": 12.345, "loss": 0.0, "peak": 1000.0},
    {"name": "ours", "ms": 11.0, "tokens/s": 9.0, "outcome": "failed", "said": "far|off"},
]
TESTS = [
    Row("tests", "fits[a|b]", "passed", 1.5),
    Row("tests", "breaks", "failed", 0.25, "AssertionError: 1 != 2"),
]


def test_lines_are_rows() -> None:
    assert row_of("part", json.dumps(SYSTEMS[0])) == Row(
        "part", "Lightning", "passed", figures={"ms": 12.345, "loss": 0.0, "peak": 1000.0}
    )
    other = row_of("part", json.dumps(SYSTEMS[1]))
    assert other is not None and (other.outcome, other.said) == ("failed", "far|off")
    assert [row_of("part", line) for line in ("", "3 passed", "{", "[1]", "{}")] == [None] * 5


def test_the_files(tmp_path: Path) -> None:
    found = [row for each in SYSTEMS if (row := row_of("side by side", json.dumps(each)))]
    write(tmp_path / "new", {"GPUs": "1 x H", "torch": "2.13.0"}, [*TESTS, *found])
    content = json.loads((tmp_path / "new" / "report.json").read_text())
    assert content["about"]["GPUs"] == "1 x H"
    assert [Row(**row) for row in content["rows"]] == [*TESTS, *found]
    assert (tmp_path / "new" / "report.md").read_text().splitlines() == [
        "GPUs 1 x H, torch 2.13.0",
        "",
        "## tests",
        "",
        "| what | outcome | seconds | |",
        "|---|---|---:|---|",
        r"| fits[a\|b] | passed | 1.5 |  |",
        "| breaks | failed | 0.25 | AssertionError: 1 != 2 |",
        "",
        "## side by side",
        "",
        "| | ms a step | loss, relative difference | peak MB | tokens/s |",
        "|---|---:|---:|---:|---:|",
        "| Lightning | 12.3 | 0 | 1e+03 |  |",
        "| ours | 11 |  |  | 9 |",
        "",
        "| what | outcome | seconds | |",
        "|---|---|---:|---|",
        r"| ours | failed |  | far\|off |",
    ]
    assert table([]) == ""


def run(code: str, seconds: float = 60) -> list[tuple[str, str, str]]:
    rows: list[Row] = []
    Budget(seconds).run("part", [sys.executable, "-c", code], 60, rows.append)
    return [(row.name, row.outcome, row.said) for row in rows]


def test_a_part_that_fails_or_is_stopped_is_a_row() -> None:
    assert run("pass") == [("part", "passed", "")]
    assert run("raise SystemExit('broken')") == [("part", "failed", "exit status 1: broken")]
    assert run("import os, sys; sys.exit(os.environ['PYTHONPATH'].split(os.pathsep)[0] != os.getcwd())") == [
        ("part", "passed", "")
    ]
    assert run("pass", seconds=0) == [("part", "skipped", "no time was left")]
    printed = f"print({json.dumps(SYSTEMS[0])!r}, flush=True)"
    assert run(printed) == [("Lightning", "passed", "")]
    stopped = run(printed + "; import time; time.sleep(60)", seconds=5)
    assert stopped == [("Lightning", "passed", ""), ("part", "failed", "stopped after 5 s")]
    assert run(printed + "; raise SystemExit('late')")[1] == ("part", "failed", "exit status 1: late")
    failed = f"print({json.dumps(SYSTEMS[1])!r}); raise SystemExit(1)"
    assert run(failed) == [("ours", "failed", "far|off")]  # says already why


def part(name: str, code: str, weight: float = 1) -> Part:
    return Part(name, [sys.executable, "-c", code], weight)


def test_a_part_that_dies_leaves_the_rows_of_the_others(tmp_path: Path) -> None:
    """Also if it kills itself. Parts without a command are skipped."""
    printed = 'print(\'{"name": "first"}\', flush=True)'
    chosen = [
        part("one", printed),
        part("two", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        Part("three", None, 1, "needs a GPU"),
        part("four", printed.replace("first", "last")),
    ]
    run_parts(chosen, Budget(60), Report(tmp_path, {}))
    found = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["name"], row["outcome"], row["said"]) for row in found] == [
        ("first", "passed", ""),
        ("two", "failed", "exit status -9: "),
        ("three", "skipped", "needs a GPU"),
        ("last", "passed", ""),
    ]


def test_a_part_gets_its_share_of_the_seconds_that_are_left() -> None:
    now, given = [0.0], list[float]()

    class Watched(Budget):
        def run(self, part, command, most, add):  # type: ignore[no-untyped-def]
            given.append(most)
            now[0] += 1  # each part takes a second

    class Nowhere(Report):
        def _write(self) -> None:
            pass

    chosen = [part("one", "", 2), part("two", "", 1), part("three", "", 1)]
    run_parts(chosen, Watched(100, lambda: now[0]), Nowhere(Path(), {}))
    assert given == [50, 49.5, 98]


def test_a_report_that_is_cut_off_has_the_rows_so_far(tmp_path: Path) -> None:
    """The process that writes the report is killed in its second part."""
    code = f"""
import sys
from pathlib import Path
from tests.gpu.report import Budget, Part, Report, run_parts
chosen = [
    Part("one", [sys.executable, "-c", "print('{{\\"name\\": \\"first\\"}}')"], 1),
    Part("two", [sys.executable, "-c", "import time; print('{{\\"name\\": \\"half\\"}}', flush=True); time.sleep(30)"], 1),
    Part("three", None, 1),
]
run_parts(chosen, Budget(60), Report(Path({str(tmp_path)!r}), {{}}, [part.name for part in chosen]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=report.ROOT, env={**os.environ, "PYTHONPATH": str(report.ROOT)}
    )
    found: list[dict[str, object]] = []
    file, end = tmp_path / "report.json", time.monotonic() + 60
    while not any(row["name"] == "half" for row in found) and time.monotonic() < end:
        found = json.loads(file.read_text())["rows"] if file.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["outcome"], row["said"]) for row in found] == [
        ("first", "passed", ""),
        ("half", "passed", ""),
        ("two", "skipped", "it has not ended"),
        ("three", "skipped", "it has not ended"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"make gpu: torch .*: nothing was run"):
        report.main()
    assert not (tmp_path / "out").exists()


def test_tests_print_their_rows(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_fits(): pass\n"
        "def test_breaks(): assert 1 == 2\n"
        "def test_stays_away(): pytest.skip('needs two GPUs')\n"
    )
    rows: list[Row] = []
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    plugin = ["-p", "no:cacheprovider", "-p", "tests.gpu.json_lines", str(tmp_path / "test_some.py")]
    Budget(60).run("tests", [*command, *plugin], 60, rows.append)
    assert [(row.name, row.outcome, row.said) for row in rows] == [
        ("test_fits", "passed", ""),
        ("test_breaks", "failed", "assert 1 == 2"),
        ("test_stays_away", "skipped", "needs two GPUs"),
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", [each.name for each in parts("cpu") if each.name != "tests"])
def test_each_part_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    """The part `tests` would run tests in a test."""
    pytest.importorskip("transformers", minversion="5.0")
    (chosen,) = (each for each in parts("cpu") if each.name == name)
    if name == "programs against the CPU":
        assert chosen.command is not None
        chosen = chosen._replace(command=[*chosen.command, "--only", "schedules|1F1B, 2|ZeRO-3$|dropout"])
    if name == "CUDA graphs":
        assert chosen.command is not None
        chosen = chosen._replace(command=[*chosen.command, "--only", "1F1B, 2|ZeRO-3$|dropout"])
    written = Report(tmp_path, {})
    run_parts([chosen], Budget(600), written)
    assert written.rows and not [row for row in written.rows if row.outcome == "failed"], written.rows
    assert all(row.figures for row in written.rows if row.outcome == "passed")


def test_make_gpu_refuses_before_it_installs_anything(tmp_path: Path) -> None:
    none = tmp_path / "nvidia-smi"
    none.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    none.chmod(0o755)
    done = subprocess.run(
        ["make", "gpu", f"GPU_VENV={tmp_path}/venv", f"NVIDIA_SMI={none}"],
        cwd=report.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode and "finds no NVIDIA GPU here" in done.stderr and not (tmp_path / "venv").exists()


def wrong(batches: Sequence[Batch], tensors: Values) -> list[Values]:
    """Runs with one parameter that is a little larger."""
    name = next(iter(tensors))
    return equality.outcomes(batches, {**tensors, name: tensors[name] + 1e-6}, CPU)


def test_other_bits_of_a_late_run_are_a_failure() -> None:
    right = equality.late_runs(CPU, None)[:1]
    assert "outcome" not in equality.compared("1F1B, 2 stages", CPU, right)
    row = equality.compared("1F1B, 2 stages", CPU, [*right, wrong])
    assert row["outcome"] == "failed" and str(row["said"]).startswith("late run 1: device 0: ")
    assert row["runs with other bits"] == 1


def test_other_bits_with_graphs_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = equality.with_graphs("1F1B, 2 stages", CPU)
    assert "outcome" not in row and row["graphs, share of passes"] == 1
    run = equality.outcomes

    def other(
        batches: Sequence[Batch], tensors: Values, *args: object, cuda_graphs: bool, **more: object
    ) -> list[Values]:
        if cuda_graphs:
            name = next(iter(tensors))
            tensors = {**tensors, name: tensors[name] + 1e-6}
        return run(batches, tensors, *args, cuda_graphs=cuda_graphs, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(equality, "outcomes", other)
    assert equality.with_graphs("1F1B, 2 stages", CPU)["outcome"] == "failed"


def test_the_distance_is_relative_and_sees_nan() -> None:
    one, two = torch.tensor([1000.0, 0.0]), torch.tensor([1000.0, 1.0])
    assert equality.distance([{"x": one}], [{"x": one}]) == 0
    assert equality.distance([{"x": one}], [{"x": two}]) == 1e-3
    assert equality.distance([{"x": one}], [{"x": one / 0}]) == float("inf")


@pytest.mark.long
def test_the_measured_memory_is_the_predicted_memory() -> None:
    """Recomputation and offload lower both."""
    from benchmarks.gpu import recomputation

    rows = {row["name"]: row for row in recomputation.measured(CPU)}
    assert all(0.99 < float(row["measured / predicted"]) < 1.01 for row in rows.values())  # type: ignore[arg-type]
    kept = rows.pop("all values kept")["measured MB"]
    assert all(row["measured MB"] < 0.7 * kept for row in rows.values())  # type: ignore[operator]


@pytest.mark.long
def test_memory_grows_with_the_stages_as_predicted() -> None:
    """With plain data parallelism, a stage takes more than twice as much memory as with ZeRO-3."""
    pytest.importorskip("transformers", minversion="5.0")
    from benchmarks.gpu import memory

    found, predicted = memory.peaks(3, CPU)
    slopes = [(values[2] - values[1]) / 4 for values in (found, predicted)]
    assert slopes[0] == pytest.approx(slopes[1], abs=0.05)
    plain, _ = memory.peaks(0, CPU)
    assert (plain[2] - plain[1]) / 4 > 2 * slopes[0]
