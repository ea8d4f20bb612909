"""The changes of each pass to the DAG, in numbers and as text.

Each pass costs time proportional to the size of the DAG, so only callers that want a trace use it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from lightning_piper.common.limits import shown
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.text import listing
from lightning_piper.passes.base import Done

# The name of a file of a trace, and the first line of its text.
_NAME = re.compile(r"\d\d+-[\w.-]+\.txt")
_HEAD = re.compile(r"(training|forward-only) step of \d+ samples\n?")


@dataclass(frozen=True)
class PassChange:
    """A summary of the changes that a pass made.

    Attributes:
        done: The pass.
        added, removed: Numbers of nodes.
        changed: Number of earlier nodes with a changed field or temporal predecessor.
    """

    done: Done
    added: int
    changed: int
    removed: int


class PassTrace:
    """A hook of `run_passes` that counts the changes of each pass. With a folder, it also writes the DAG
    after each pass.

    Attributes:
        changes: The changes of each pass so far.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create the hook.

        Args:
            folder: Folder for the texts `00-capture.txt`, `01-place.txt` ...; files of an earlier trace are
                removed. Lines are sorted by node id, so `diff` shows the changes of a pass.

        Raises:
            PiperError: The folder cannot be written, or has other files.
        """
        self.changes: list[PassChange] = []
        # id of a node -> (a copy of the node after the previous pass, its `_waits`)
        self._before: dict[int, tuple[Node, dict[int, int]]] = {}
        self._folder = folder
        if folder is not None:
            _clear(folder)

    def __call__(self, dag: TrainingDAG, done: Done) -> None:
        """Count the changes of a pass. If there is a folder, write the DAG to a file."""
        now = {i: (dataclasses.replace(node), _waits(dag, i)) for i, node in dag.nodes.items()}
        kept = now.keys() & self._before.keys()
        changed = sum(now[i] != self._before[i] for i in kept)
        self.changes.append(PassChange(done, len(now) - len(kept), changed, len(self._before) - len(kept)))
        self._before = now
        if self._folder is not None:
            name = re.sub(r"[^\w.-]+", "-", done.by.name)[:60]
            _write(self._folder / f"{len(self.changes) - 1:02}-{name}.txt", listing(dag) + "\n")


def _waits(dag: TrainingDAG, node: int) -> dict[int, int]:
    """Return the nodes for which a node waits because of an order, each with the index of its directive."""
    return {i: edge["order"] for i, edge in dag.graph.pred[node].items() if edge["order"] is not None}


def _clear(folder: Path) -> None:
    """Create the folder, or remove an earlier trace from it. Raise an error if it has other files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.iterdir())
        for path in found:
            if not _is_own(path):
                other = f"{shown(str(folder))} contains {path.name}, which is not a dump of passes"
                raise PiperError(f"{other}. Give a new or empty folder [PIPER-R003]")
        for path in found:
            path.unlink()
    except FileExistsError:
        raise PiperError(f"{shown(str(folder))} is a file. Give a folder [PIPER-R003]") from None
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None


def _is_own(path: Path) -> bool:
    if not _NAME.fullmatch(path.name) or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _HEAD.fullmatch(file.readline(80)) is not None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: Exception) -> PiperError:
    return PiperError(
        f"{shown(str(path))} cannot be written: {getattr(error, 'strerror', None) or error}. Give a folder that "
        "exists or can be created, and can be written [PIPER-R003]"
    )
