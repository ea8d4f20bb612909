"""The length of the programs: directives of the simplified DualPipe, and lines of the schedule builders."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from benchmarks.paper.table import show
from examples.qwen3_moe.programs import simplified_dualpipe
from lightning_piper.schedules.dualpipe import _crossing, dualpipev_rows
from lightning_piper.schedules.interleaving import _rounds, interleaved_rows
from lightning_piper.schedules.pipeline import _one_f_one_b, one_f_one_b_rows

# Schedule -> the functions that make the rows of passes, and the lines of the paper's builder.
BUILDERS: dict[str, tuple[list[Callable[..., Any]], int]] = {
    "1F1B": ([one_f_one_b_rows, _one_f_one_b], 29),
    "interleaved 1F1B": ([interleaved_rows, _rounds], 38),
    "DualPipeV": ([dualpipev_rows, _crossing], 63),
}


def length(function: Callable[..., Any]) -> int:
    """Return the lines of a function, without decorators, its docstring, comments and blank lines."""
    lines = inspect.getsource(function).splitlines()
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef)
    first = node.body[0]
    text = set(range(first.lineno, (first.end_lineno or 0) + 1)) if ast.get_docstring(node) else set()
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and i not in text and i >= node.lineno
        for i, line in enumerate(lines, 1)
    )


def lines() -> None:
    """Print the number of directives and of lines."""
    rows = [["simplified DualPipe, directives", len(simplified_dualpipe([0, 1], [2, 3])), 11]]
    for name, (functions, paper) in BUILDERS.items():
        rows.append([f"builder of {name}, lines", sum(map(length, functions)), paper])
    show(["program", "ours", "paper"], rows)
