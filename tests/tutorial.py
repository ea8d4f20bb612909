"""docs/tutorial.md as a reader follows it: write its files, type its commands, compare what they print.

python -m tests.tutorial            # every command, in processes of its own; as `make docs` does
python -m tests.tutorial --write    # put what they print into the page
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FILE = r"`(?P<file>\w+\.py)`[^`]*?:\n\n```python\n(?P<content>.*?)```"
COMMAND = r"```\n\$ (?P<command>.*?)\n(?P<output>.*?)```"
STEP = re.compile(f"{FILE}|{COMMAND}", re.DOTALL)
NUMBER = re.compile(r"\d\.\de[+-]\d\d|\d+\.\d+")
LIMIT = 800.0  # seconds for a command, also on a slow machine


def follow(text: str, folder: Path, run: Callable[[str], str]) -> str:
    """Return the page with the current output of its commands, in the order of the page. A file may be
    written again.
    """

    def step(found: re.Match[str]) -> str:
        if found["file"]:
            (folder / found["file"]).write_text(found["content"])
            return found[0]
        return f"```\n$ {found['command']}\n{run(found['command']).rstrip()}\n```"

    return STEP.sub(step, text)


def alike(shown: str, found: str) -> bool:
    """Return whether two outputs are equal except for numbers. Rounding errors (1.2e-07) may differ, and
    other numbers must agree to a thousandth.
    """
    if NUMBER.sub("#", shown) != NUMBER.sub("#", found):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(found), strict=True)
    return all("e" in a or abs(float(a) - float(b)) <= 1e-3 * abs(float(a)) for a, b in pairs)


def typed(folder: Path) -> Callable[[str], str]:
    """Return a function that runs a command in a process of its own, as a user types it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "112"}

    def run(command: str) -> str:
        name, *arguments = command.split()
        start = (
            [sys.executable, "-m", "lightning_piper.cli"] if name == "lightning-piper" else [sys.executable]
        )
        done = subprocess.run(
            [*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        if done.returncode and name == "python":
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stderr if done.returncode else done.stdout

    return run


def main() -> int:
    folder = Path(tempfile.mkdtemp())
    shown = PAGE.read_text(encoding="utf-8")
    found = follow(shown, folder, typed(folder))
    shutil.rmtree(folder)
    if "--write" in sys.argv:
        PAGE.write_text(found, encoding="utf-8")
        return 0
    for a, b in zip(shown.splitlines(), found.splitlines(), strict=False):
        if not alike(a, b):
            print(f"docs/tutorial.md shows\n  {a}\nbut there comes\n  {b}", file=sys.stderr)
            return 1
    return int(not alike(shown, found))


if __name__ == "__main__":
    sys.exit(main())
