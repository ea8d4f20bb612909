"""The scripts of docs/found.md print what the page says, with the versions that the page names.

With another version, a script may print the right result: then its test is skipped as mended upstream.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from examples.found.report import report, text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "found.md").read_text(encoding="utf-8")
ROW = r"^\| (\w+) ([\d.]+) \| \[(\w+)\]\(\.\./examples/found/\3\.py\): [^|]* \| ([^|]*) \| ([^|]*) \|"
ROWS = {
    name: (package, tested, right, printed)
    for package, tested, name, right, printed in re.findall(ROW, PAGE, re.M)
}
LIMIT = 200  # seconds


def numbers(cell: str) -> list[float]:
    """Return the numbers that a script prints. Processors differ in the last of four digits."""
    return [float(number) for number in cell.split(", ")]


def test_every_script_has_a_row() -> None:
    scripts = {path.stem for path in (ROOT / "examples" / "found").glob("*_*.py") if path.stem != "__init__"}
    assert scripts == {*ROWS} and len(ROWS) == PAGE.count("](../examples/found/")


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_the_bug_is_there(name: str) -> None:
    package, tested, right, printed = ROWS[name]
    same_version = version(package).partition("+")[0] == tested
    run = subprocess.run(
        [sys.executable, "-m", f"examples.found.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    lines = run.stdout.splitlines()
    if not same_version and (run.returncode or lines[-1] == "mended upstream"):
        pytest.skip(f"mended upstream: {package} {version(package)} does not have the bug of {tested}")
    assert run.returncode == 0, run.stderr
    assert lines[-1] == "wrong"
    if same_version:
        found = [line.partition(": ")[2] for line in lines[-3:-1]]
        assert [*map(numbers, found)] == [
            pytest.approx(numbers(cell), rel=0.01, abs=1e-3, nan_ok=True) for cell in (right, printed)
        ]


def test_a_right_result_is_not_called_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    report("torch", [1.0, 2.0], [1.00001, 2.0])
    assert capsys.readouterr().out.endswith("mended upstream\n")
    report("torch", [1.0, 2.0], [1.01, 2.0])
    assert capsys.readouterr().out.endswith("wrong\n")
    assert text(-0.0) == "0"
