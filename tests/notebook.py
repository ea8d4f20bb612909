"""Runs examples/notebook.ipynb as a reader does: all cells in order, in a new kernel. The first error ends
the run.

    python -m tests.notebook            # compare what the cells print with the file, as `make docs` does
    python -m tests.notebook --write    # put what the cells print into the file

Needs the extra `docs`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.tutorial import LIMIT, ROOT, alike

PAGE = ROOT / "examples" / "notebook.ipynb"
LARGEST = 100_000  # largest size of the file, in bytes


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.get("outputs", []) if output["output_type"] == "stream")


def main() -> int:
    os.environ |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "112",
        "PYTHONWARNINGS": "ignore",
    }
    shown, found = (nbformat.read(PAGE, as_version=4) for _ in range(2))
    NotebookClient(found, timeout=int(LIMIT), record_timing=False).execute(cwd=str(PAGE.parent))
    if "--write" in sys.argv:
        found.metadata = shown.metadata  # without the version of Python
        nbformat.write(found, PAGE)
    if PAGE.stat().st_size > LARGEST:
        print(
            f"{PAGE.name} has {PAGE.stat().st_size} bytes. Keep its outputs small: at most {LARGEST}",
            file=sys.stderr,
        )
        return 1
    if "--write" in sys.argv:
        return 0
    for before, after in zip(shown.cells, found.cells, strict=True):
        if not alike(printed(before), printed(after)):
            print(f"{PAGE.name} shows\n{printed(before)}\nbut there comes\n{printed(after)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
