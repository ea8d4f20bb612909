"""Runs the parts of `make gpu` and writes their report: comparisons of all programs with the CPU, tests,
measurements, several systems side by side, and a sanitizer. The most valuable parts come first.

    python -m tests.gpu.report [--out build/gpu] [--seconds 480]
    python -m tests.gpu.report --device cpu --out /tmp/rehearsal       # runs all parts small, without a GPU

Writes `report.json` and `report.md` after each row, so a run that is cut off has written the rows so far. The
exit status tells whether a part failed or was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
# Keys of figures that `benchmarks/one_gpu.py` prints -> headings. Other keys are headings themselves.
FIGURES = {"ms": "ms a step", "peak": "peak MB", "loss": "loss, relative difference"}
FIELDS = ("name", "outcome", "seconds", "said")  # of a printed row; all its other keys are figures


@dataclass(frozen=True)
class Row:
    """The result of one test, system or command.

    Attributes:
        part: The part of the report.
        outcome: `passed`, `failed` or `skipped`.
        seconds: Its duration; None if it was not measured.
        said: Why it failed or was skipped.
        figures: The measurements by name.
    """

    part: str
    name: str
    outcome: str
    seconds: float | None = None
    said: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def row_of(part: str, line: str) -> Row | None:
    """The row of a line that a part has printed: a JSON object with a name and figures. None if the line is
    something else.
    """
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or "name" not in found:
        return None
    figures = {key: x for key, x in found.items() if key not in FIELDS}
    return Row(
        part,
        found["name"],
        found.get("outcome", "passed"),
        found.get("seconds"),
        found.get("said", ""),
        figures,
    )


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows with figures, one row for each system; then a table of outcomes for the
    rows without figures, and for the rows that failed.
    """
    lines = []
    measured = [row for row in rows if row.figures]
    if measured:
        keys = list(dict.fromkeys(key for row in measured for key in row.figures))
        lines += [
            f"| | {' | '.join(FIGURES.get(key, key) for key in keys)} |",
            f"|---|{'---:|' * len(keys)}",
        ]
        lines += [
            f"| {_cell(row.name)} | {' | '.join(_shown(row.figures.get(key)) for key in keys)} |"
            for row in measured
        ]
        lines.append("")
    others = [row for row in rows if not row.figures or row.outcome != "passed"]
    if others:
        lines += ["| what | outcome | seconds | |", "|---|---|---:|---|"]
        lines += [
            f"| {_cell(row.name)} | {row.outcome} | {_shown(row.seconds)} | {_cell(row.said)} |"
            for row in others
        ]
        lines.append("")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(folder: Path, about: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write `report.json` and `report.md`, with a section for each part. A reader never finds half of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"version": 2, "about": dict(about), "rows": [dataclasses.asdict(row) for row in rows]}
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.part, []).append(row)
    heading = ", ".join(f"{key} {value}" for key, value in about.items())
    sections = [f"## {part}\n\n{table(found)}" for part, found in parts.items()]
    texts = {
        "report.json": json.dumps(content, indent=1) + "\n",
        "report.md": "\n".join([heading, "", *sections]),
    }
    for name, text in texts.items():
        new = folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)


class Report:
    """The rows so far. Each new row is written at once. Parts that have not ended have a row that says so."""

    def __init__(self, folder: Path, about: Mapping[str, str], parts: Sequence[str] = ()) -> None:
        self._folder, self._about, self._left = folder, about, list(parts)
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write()

    def ended(self, part: str) -> None:
        self._left = [each for each in self._left if each != part]
        self._write()

    def _write(self) -> None:
        left = [Row(part, part, "skipped", said="it has not ended") for part in self._left]
        write(self._folder, self._about, [*self.rows, *left])


class Budget:
    """The seconds that the parts may still take. Each part runs as a process of its own."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def run(self, part: str, command: Sequence[str], most: float, add: Callable[[Row], None]) -> None:
        """Run a command as a part of the report, for at most `most` seconds. Calls `add` with each row that
        the command prints, at once. If the command fails, is stopped or prints no rows, there is one more row
        that says so.
        """
        limit = min(most, self.left)
        if limit <= 0:
            add(Row(part, part, "skipped", said="no time was left"))
            return
        start, outcomes = self._clock(), list[str]()

        def read(line: str) -> None:
            row = row_of(part, line)
            if row is not None:
                outcomes.append(row.outcome)
                add(row)

        said = _ran(command, limit, read)
        seconds = self._clock() - start
        # pytest exits with 1 if a test has failed, and the row of this test says so already.
        if said.startswith("stopped") or (said and "failed" not in outcomes):
            add(Row(part, part, "failed", seconds, said))
        elif not outcomes:
            add(Row(part, part, "passed", seconds))


def _ran(command: Sequence[str], limit: float, read: Callable[[str], None]) -> str:
    """Run a command, and call `read` with each line of its output. Returns why it failed or was stopped, or
    an empty text. A command that is stopped ends with all processes that it has started.
    """
    # A GPU machine may not have the package installed, so the command finds it in this folder.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    last = [""]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                                   errors="replace", env={**os.environ, "PYTHONPATH": path},
                                   start_new_session=True)  # fmt: skip
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def follow(stream: IO[str]) -> None:
            for line in stream:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=follow, args=(process.stdout,), daemon=True)
        reader.start()
        end = time.monotonic() + limit
        try:
            while (line := lines.get(timeout=max(end - time.monotonic(), 0.01))) is not None:
                last[0] = line.strip() or last[0]
                read(line)
            status = process.wait(timeout=max(end - time.monotonic(), 1))
        except (queue.Empty, subprocess.TimeoutExpired):
            return f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        text = (errors.read().strip().splitlines() or last)[-1]
        return f"exit status {status}: {text}" if status else ""


class Part(NamedTuple):
    """A part of the report.

    Attributes:
        name: Its name.
        command: What runs it; None if this machine cannot run it.
        weight: Its share of the seconds that are left, in relation to the parts after it. Parts that end
            early leave their seconds to later parts.
        missing: Why `command` is None.
    """

    name: str
    command: Sequence[str] | None
    weight: float
    missing: str = ""


def parts(device: str) -> list[Part]:
    """All parts, the most valuable one first."""
    python = [sys.executable, "-m"]
    tests = [*python, "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.json_lines"]

    on_cpu = [
        "--deselect",
        "tests/gpu/test_delays_cuda.py::test_programs_run_here",
    ]  # two processes over gloo

    def measure(name: str) -> list[str]:
        return [*python, "benchmarks.gpu", name, "--device", device]

    sanitizer = shutil.which("compute-sanitizer") if device == "cuda" else None
    checked = [*tests, "tests/gpu/test_local_cuda.py", "-k", "mlp and 2"]
    one_gpu = [sys.executable, "benchmarks/one_gpu.py", "--json", "--device", device]
    small = ["--steps", "3", "--systems", "PiperStrategy$"] if device == "cpu" else []
    return [
        Part("programs against the CPU", [*python, "tests.gpu.equality", "--device", device], 70),
        Part("CUDA graphs", [*python, "tests.gpu.equality", "--graphs", "--device", device], 30),
        Part("tests", [*tests, "tests/gpu", *on_cpu], 150),
        Part("memory and stages", measure("memory"), 25),
        Part("qwen3", measure("qwen3"), 110),
        Part("recomputation and offload", measure("recomputation"), 25),
        Part("precision", measure("precision"), 25),
        Part("host time", measure("overhead"), 20),
        Part("fit of the simulator", measure("hardware"), 25),
        Part("side by side", [*one_gpu, *small], 30),
        Part(
            "sanitizer",
            None if sanitizer is None else [sanitizer, "--error-exitcode", "9", *checked],
            20,
            "compute-sanitizer is not installed" if device == "cuda" else "needs a GPU",
        ),
    ]


def run_parts(chosen: Sequence[Part], budget: Budget, report: Report) -> None:
    """Run parts one after the other."""
    for i, part in enumerate(chosen):
        share = part.weight / sum(each.weight for each in chosen[i:])
        if part.command is None:
            report.add(Row(part.name, part.name, "skipped", said=part.missing))
        else:
            budget.run(part.name, part.command, share * budget.left, report.add)
        report.ended(part.name)


def why_not() -> str | None:
    """Why this machine can run none of the parts; None if it can."""
    if torch.cuda.is_available():
        return None
    built = (
        "is built without CUDA"
        if torch.version.cuda is None
        else f"is built for CUDA {torch.version.cuda}, and finds no GPU"
    )
    return f"torch {torch.__version__} {built}: nothing was run"


def about(device: str) -> dict[str, str]:
    """The GPUs, the releases of Python and torch, the commit and the date, for the report's heading."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    where = {"GPUs": f"{len(names)} x {names[0]}"} if device == "cuda" else {"rehearsal": "on a CPU"}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {**where, "Python": platform.python_version(), "torch": torch.__version__,
            "commit": commit or "unknown", "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="a pattern of names of parts")
    options = parser.parse_args()
    if options.device == "cuda" and (reason := why_not()) is not None:
        sys.exit(f"make gpu: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the part, too
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(options.device) if re.search(options.only, part.name)]
    report = Report(options.out, about(options.device), [part.name for part in chosen])
    run_parts(chosen, Budget(options.seconds), report)
    print((options.out / "report.md").read_text(encoding="utf-8"))
    if any(row.outcome == "failed" for row in report.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
