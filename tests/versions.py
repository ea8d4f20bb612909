"""`make versions`: run tests with other releases of Python, torch and Lightning, and print a table of results.

    python -m tests.versions [--all] [--environments build/versions] [2.15.0 ...]

Each combination has a virtual environment, which later runs use again. With `--all`, all tests of `make test`
run, otherwise some of them, which take a few minutes. The README's example also runs from the wheel, in an
empty environment (`tests.wheel`). docs/versions.md has the results.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PART = (
    "tests/capture",
    "tests/runtime",
    "tests/distributed",
    "tests/strategy/test_fit_local.py",
    "tests/strategy/test_fit_processes.py",
    "tests/strategy/test_checkpoint.py",
    "tests/strategy/test_real_models.py",
    "property_tests/test_steps.py",
)
VERSIONS = (
    "import platform, torch, lightning; "
    "print(platform.python_version(), torch.__version__, lightning.__version__)"
)
COUNTS = re.compile(r"\d+ (?:passed|failed|errors?)\b")


class Combination(NamedTuple):
    """Releases that are tested together. An empty `lightning` stands for the newest release."""

    python: str
    torch: str
    lightning: str

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}-lightning{self.lightning or '-newest'}"


COMBINATIONS = (
    Combination("3.12", "2.11.0", "2.6.0"),
    Combination("3.11", "2.12.1", "2.6.1"),
    Combination("3.12", "2.14.1", ""),
    Combination("3.13", "2.15.0", ""),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="torch", help="releases of torch (default: all)")
    parser.add_argument("--all", action="store_true", help="all tests of make test")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "versions")
    args = parser.parse_args()
    wanted = [each for each in COMBINATIONS if not args.releases or each.torch in args.releases]
    if not wanted:
        sys.exit(f"no combination has torch {', '.join(args.releases)}. Add it to COMBINATIONS in {__file__}")
    print("| Python | torch | Lightning | tests | result | wheel | date |\n|---|---|---|---|---|---|---|")
    failed = False
    for each in wanted:
        interpreter = shutil.which(f"python{each.python}")
        if interpreter is None:
            print(
                f"| {each.python} | {each.torch} | | | this machine does not have Python {each.python} | | |"
            )
            continue
        python = environment(each, interpreter, args.environments)
        used = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True, cwd=ROOT)
        tests, result, good = tested(python, args.all, args.environments / f"{each.name}.log")
        wheel = subprocess.run([python, "-m", "tests.wheel"], cwd=ROOT).returncode == 0
        failed |= not good or not wheel
        day = datetime.date.today().isoformat()
        print(
            f"| {' | '.join(used.stdout.split())} | {tests} | {result} | {'runs' if wheel else 'fails'} | {day} |",
            flush=True,
        )
    sys.exit(failed)


def environment(each: Combination, interpreter: str, folder: Path) -> Path:
    """Return the Python of a combination's environment. Make the environment if it does not exist."""
    python, made = folder / each.name / "bin" / "python", folder / each.name / ".installed"
    if not made.exists():
        subprocess.run([interpreter, "-m", "venv", folder / each.name], check=True)
        constraints = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints.write_text("\n".join(line for line in lines if not line.startswith("torch=")) + "\n")
        lightning = f"lightning=={each.lightning}" if each.lightning else "lightning"
        packages = [f"torch=={each.torch}", lightning, "setuptools>=77,<82", "-e", ".[test]"]
        install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", *packages]
        # in the place of a constraint in pip's configuration, which may exclude a release
        subprocess.run(install, check=True, cwd=ROOT, env={**os.environ, "PIP_CONSTRAINT": str(constraints)})
        made.touch()
    return python


def tested(python: Path, everything: bool, log: Path) -> tuple[str, str, bool]:
    """Run the tests.

    Returns:
        Which tests ran, how many passed and failed, and whether all passed.
    """
    paths = ["tests", "property_tests"] if everything else PART
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        *paths,
    ]
    with log.open("w", encoding="utf-8") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    summaries = [line for line in log.read_text(encoding="utf-8").splitlines() if COUNTS.search(line)]
    counts = ", ".join(COUNTS.findall(summaries[-1])) if summaries else f"did not run, see {log}"
    return "of make test" if everything else "a part", counts, done.returncode == 0


if __name__ == "__main__":
    main()
