"""Runs the parts of `make gpu` and writes their report: the tests on the GPUs of this machine, several
systems side by side, and a sanitizer.

    python -m tests.gpu.report [--out build/gpu] [--seconds 480]

Writes `report.json` and `report.md` even if a part fails or is stopped; the exit status tells whether a part
failed or was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FIGURES = {"ms": "ms a step", "peak": "peak MB", "loss": "loss, relative difference"}


@dataclass(frozen=True)
class Row:
    """The result of one test, system or command.

    Attributes:
        part: The part of the report.
        outcome: `passed`, `failed` or `skipped`.
        seconds: Its duration; None if it was not measured.
        said: Why it failed or was skipped.
        figures: The measurements, by the keys of `FIGURES`.
    """

    part: str
    name: str
    outcome: str
    seconds: float | None = None
    said: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def rows_of_tests(part: str, junit: str) -> list[Row]:
    """The rows of the tests in a file that pytest has written with `--junitxml`."""
    rows = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        outcome, said = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome, said = "skipped" if child.tag == "skipped" else "failed", child.get("message", "")
        rows.append(
            Row(
                part,
                str(case.get("name")),
                outcome,
                float(case.get("time", 0)),
                said.splitlines()[0] if said else "",
            )
        )
    return rows


def rows_of_systems(part: str, text: str) -> list[Row]:
    """The rows of what `benchmarks/one_gpu.py --json` has printed: each line is an object with a name and
    figures.
    """
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [
        Row(part, each["name"], "passed", figures={k: each[k] for k in FIGURES if k in each})
        for each in found
    ]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows with figures, one row for each system; then a table of outcomes for the
    rows without figures.
    """
    lines = []
    measured = [row for row in rows if row.figures]
    if measured:
        keys = [key for key in FIGURES if any(key in row.figures for row in measured)]
        lines += [f"| | {' | '.join(FIGURES[key] for key in keys)} |", f"|---|{'---:|' * len(keys)}"]
        lines += [
            f"| {row.name} | {' | '.join(_shown(row.figures.get(key)) for key in keys)} |" for row in measured
        ]
        lines.append("")
    others = [row for row in rows if not row.figures]
    if others:
        lines += ["| part | what | outcome | seconds | |", "|---|---|---|---:|---|"]
        lines += [
            f"| {row.part} | {_cell(row.name)} | {row.outcome} | {_shown(row.seconds)} | {_cell(row.said)} |"
            for row in others
        ]
        lines.append("")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(folder: Path, about: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write `report.json` and `report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"version": 1, "about": dict(about), "rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    heading = ", ".join(f"{key} {value}" for key, value in about.items())
    (folder / "report.md").write_text(f"{heading}\n\n{table(rows)}", encoding="utf-8")


class Budget:
    """The seconds that the parts may still take; each part runs as a process of its own."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    def run(
        self, part: str, command: Sequence[str], most: float, read: Callable[[str], list[Row]] | None = None
    ) -> list[Row]:
        """Run a command as a part of the report. Returns the rows that `read` makes of what the command
        prints, and one more row if the command fails or is stopped; without `read`, one row with the outcome.
        """
        limit = min(most, self._end - self._clock())
        if limit <= 0:
            return [Row(part, part, "skipped", said="no time was left")]
        start = self._clock()
        try:
            # A GPU machine may not have the package installed, so the command finds it in this folder.
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit,
                                  env={**os.environ, "PYTHONPATH": path})  # fmt: skip
        except subprocess.TimeoutExpired as error:
            printed, said = (error.stdout or b"").decode(), f"stopped after {limit:.0f} s"
        else:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            printed = done.stdout
            said = f"exit status {done.returncode}: {' '.join(last)}" if done.returncode else ""
        rows = self._read(read, printed)
        if said and not any(row.outcome == "failed" for row in rows):
            rows.append(Row(part, part, "failed", self._clock() - start, said))
        outcome, said = ("passed", "") if read is None else ("failed", "it printed nothing that can be read")
        return rows or [Row(part, part, outcome, self._clock() - start, said)]

    def _read(self, read: Callable[[str], list[Row]] | None, printed: str) -> list[Row]:
        try:
            return [] if read is None else read(printed)
        except (OSError, ValueError, KeyError, ElementTree.ParseError):
            return []


def parts(budget: Budget, folder: Path) -> list[Row]:
    """Run all parts, and return their rows."""
    junit, python = folder / "tests.xml", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    junit.unlink(missing_ok=True)
    rows = budget.run(
        "tests",
        [*python, "tests/gpu", f"--junitxml={junit}"],
        240,
        lambda _: rows_of_tests("tests", junit.read_text()),
    )
    rows += budget.run("side by side", [sys.executable, "benchmarks/one_gpu.py", "--json"], 150,
                       lambda text: rows_of_systems("side by side", text))  # fmt: skip
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return [
            *rows,
            Row("sanitizer", "compute-sanitizer", "skipped", said="compute-sanitizer is not installed"),
        ]
    command = [sanitizer, "--error-exitcode", "9", *python, "tests/gpu/test_local_cuda.py", "-k", "mlp and 2"]
    return rows + budget.run("sanitizer", command, 120)


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


def about() -> dict[str, str]:
    """The GPUs, the release of torch, the commit and the date, for the report's heading."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {"GPUs": f"{len(names)} x {names[0]}", "torch": torch.__version__, "commit": commit or "unknown",
            "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"make gpu: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = parts(Budget(options.seconds), options.out.resolve())
    write(options.out, about(), rows)
    print((options.out / "report.md").read_text(encoding="utf-8"))
    if any(row.outcome == "failed" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
