"""The report of `make gpu`: what is read, what is written, and what is said where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu import report
from tests.gpu.report import Budget, Row, rows_of_systems, rows_of_tests, table, write

JUNIT = """<testsuites><testsuite>
<testcase name="fits[a|b]" time="1.5"/>
<testcase name="breaks" time="0.25"><failure message="AssertionError: 1 != 2&#10;assert"/></testcase>
<testcase name="stays away" time="0"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""
SYSTEMS = [
    {"name": "Lightning", "ms": 12.345, "loss": 0.0, "peak": 1000.0},
    {"name": "ours", "ms": 11.0, "loss": 1e-7},
]
LINES = "".join(json.dumps(each) + "\n" for each in SYSTEMS)


def test_tests_and_systems_are_rows() -> None:
    found = rows_of_tests("tests", JUNIT)
    assert [(row.name, row.outcome, row.seconds, row.said) for row in found] == [
        ("fits[a|b]", "passed", 1.5, ""),
        ("breaks", "failed", 0.25, "AssertionError: 1 != 2"),
        ("stays away", "skipped", 0.0, "needs two GPUs"),
    ]
    assert rows_of_systems("side by side", LINES)[0].figures == {"ms": 12.345, "peak": 1000.0, "loss": 0.0}


def test_the_files(tmp_path: Path) -> None:
    rows = [*rows_of_tests("tests", JUNIT), *rows_of_systems("side by side", LINES)]
    write(tmp_path / "new", {"GPUs": "1 x H", "torch": "2.13.0"}, rows)
    content = json.loads((tmp_path / "new" / "report.json").read_text())
    assert content["about"]["GPUs"] == "1 x H" and [Row(**row) for row in content["rows"]] == rows
    assert (tmp_path / "new" / "report.md").read_text().splitlines() == [
        "GPUs 1 x H, torch 2.13.0",
        "",
        "| | ms a step | peak MB | loss, relative difference |",
        "|---|---:|---:|---:|",
        "| Lightning | 12.3 | 1e+03 | 0 |",
        "| ours | 11 |  | 1e-07 |",
        "",
        "| part | what | outcome | seconds | |",
        "|---|---|---|---:|---|",
        r"| tests | fits[a\|b] | passed | 1.5 |  |",
        "| tests | breaks | failed | 0.25 | AssertionError: 1 != 2 |",
        "| tests | stays away | skipped | 0 | needs two GPUs |",
    ]
    assert table([]) == ""


def run(code: str, seconds: float = 60, read: bool = False) -> list[tuple[str, str, str]]:
    rows = Budget(seconds).run(
        "part", [sys.executable, "-c", code], 60, partial(rows_of_systems, "part") if read else None
    )
    return [(row.name, row.outcome, row.said) for row in rows]


def test_a_part_that_fails_or_is_stopped_is_a_row() -> None:
    assert run("pass") == [("part", "passed", "")]
    assert run("raise SystemExit('broken')") == [("part", "failed", "exit status 1: broken")]
    assert run("import os, sys; sys.exit(os.environ['PYTHONPATH'].split(os.pathsep)[0] != os.getcwd())") == [
        ("part", "passed", "")
    ]
    assert run("pass", read=True) == [("part", "failed", "it printed nothing that can be read")]
    assert run("pass", seconds=0) == [("part", "skipped", "no time was left")]
    printed = f"print({json.dumps(SYSTEMS[0])!r}, flush=True)"
    assert run(printed, read=True) == [("Lightning", "passed", "")]
    stopped = run(printed + "; import time; time.sleep(60)", seconds=5, read=True)
    assert stopped == [("Lightning", "passed", ""), ("part", "failed", "stopped after 5 s")]
    assert run(printed + "; raise SystemExit('late')", read=True)[1] == (
        "part",
        "failed",
        "exit status 1: late",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"make gpu: torch .*: nothing was run"):
        report.main()
    assert not (tmp_path / "out").exists()


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
