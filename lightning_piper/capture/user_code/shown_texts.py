"""Find out whether the user's code only shows a text: prints it or logs it.

The text of a value that is not known during a trace has a fixed phrase in place of the value. Such a text may be
shown, but no computation, file or object may get it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import logging
import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

_PIPER = str(Path(__file__).parents[2]) + "/"
# files of torch through which a call of `str`, `repr` or `format` of a tensor passes
_PATH_OF_TEXTS = tuple(
    str(Path(torch.__file__).parent / name) for name in ("_tensor.py", "_tensor_str.py", "overrides.py")
)
_MAKING = ("__str__", "__repr__", "__format__", "__torch_function__", "call", "text_of_value")
_SHOWING = ("logging", "tqdm")  # packages that only show the texts that they get
# A text stays a part of the text or container that these expressions and calls make of it.
_KEEPING = (
    ast.JoinedStr, ast.FormattedValue, ast.Starred, ast.keyword, ast.Tuple, ast.List, ast.ListComp, ast.GeneratorExp
)  # fmt: skip
_KEEPING_CALLS = ("str", "repr", "format", "map", "join")


def is_only_shown() -> bool:
    """Return whether the text that the running code makes is only shown.

    This holds if `print` (to a standard stream), `self.print` of a LightningModule, `logging` or tqdm gets the
    text, directly or in a local variable that nothing else reads. Texts in messages of Piper and torch are shown,
    too.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        if file.startswith(_PIPER):
            if frame.f_code.co_name not in _MAKING:
                return True
        elif package == "torch":
            if not file.startswith(_PATH_OF_TEXTS):
                return True
        else:
            return package in _SHOWING or _is_shown_by(frame)
        frame = frame.f_back
    return False


def _is_shown_by(frame: types.FrameType) -> bool:
    code = frame.f_code
    line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    tree = _parsed(code.co_filename)
    if tree is None or None in (line, end_line, column, end_column):
        return False
    node = tree.innermost((line, column), (end_line, end_column))
    return node is not None and tree.is_shown(node, frame, frozenset())


@functools.lru_cache(maxsize=16)
def _parsed(file: str) -> _Source | None:
    """Return the source of a file, or None if it cannot be read or parsed."""
    try:
        return _Source(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):
        return None


class _Source:
    """A parsed file, with the parent of each node."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def innermost(self, start: Any, end: Any) -> ast.AST | None:
        """Return the innermost node that contains the code between two pairs (line, column in bytes)."""
        found: ast.AST | None = None
        inside = list(ast.iter_child_nodes(self._tree))
        while inside:
            node = inside.pop()
            if not hasattr(node, "lineno"):  # comprehensions and arguments have no position of their own
                inside += ast.iter_child_nodes(node)
            elif (node.lineno, node.col_offset) <= start and end <= (node.end_lineno, node.end_col_offset):  # type: ignore[attr-defined]
                found, inside = node, list(ast.iter_child_nodes(node))
        return found

    def is_shown(self, node: ast.AST, frame: types.FrameType, variables: frozenset[str]) -> bool:
        """Return whether the text that `node` makes or reads is only shown.

        Args:
            frame: runs the code.
            variables: local variables whose reads are being examined.
        """
        while not (isinstance(node, ast.Call) and _shows(node, frame)):
            parent = self._parents.get(node)
            if isinstance(parent, ast.Assign | ast.AugAssign):
                targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
                return all(
                    isinstance(x, ast.Name) and self._is_read_to_show(x, frame, variables) for x in targets
                )
            if parent is None or not _keeps(parent, frame):
                return False
            node = parent
        return True

    def _is_read_to_show(self, name: ast.Name, frame: types.FrameType, variables: frozenset[str]) -> bool:
        """Return whether all reads of a local variable only show it."""
        if name.id in variables:
            return True
        scope: ast.AST = name
        while not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            if scope not in self._parents:
                return False  # a global
            scope = self._parents[scope]
        inside = list(ast.walk(scope))
        if any(isinstance(x, ast.Global | ast.Nonlocal) and name.id in x.names for x in inside):
            return False
        reads = [
            x
            for x in inside
            if isinstance(x, ast.Name) and x.id == name.id and not isinstance(x.ctx, ast.Store)
        ]
        return all(self.is_shown(x, frame, variables | {name.id}) for x in reads)


def _keeps(node: ast.AST, frame: types.FrameType) -> bool:
    """Return whether a text in `node` stays a part of the text or container that `node` makes, or `node` shows
    it."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add | ast.Mod)
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in _KEEPING_CALLS or _shows(node, frame)
    return isinstance(node, _KEEPING)


def _shows(call: ast.Call, frame: types.FrameType) -> bool:
    """Return whether a call only shows its arguments."""
    function = _value_of(call.func, frame)
    if function is builtins.print:
        files = [_value_of(x.value, frame) for x in call.keywords if x.arg in ("file", None)]
        return all(x in (sys.stdout, sys.stderr) for x in files)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, pl.LightningModule):
        return getattr(function, "__name__", "") == "print"
    if isinstance(owner, logging.Logger | logging.LoggerAdapter):
        return True
    package, _, rest = str(getattr(function, "__module__", "")).partition(".")
    return package in _SHOWING or rest.endswith("rank_zero")


def _value_of(expression: ast.AST, frame: types.FrameType | None) -> Any:
    """Return the value of a name or of an attribute of a name. Return None for any other expression, or if the name
    has no value."""
    if isinstance(expression, ast.Attribute):
        return getattr(_value_of(expression.value, frame), expression.attr, None)
    if not isinstance(expression, ast.Name) or frame is None:
        return None
    name = expression.id
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    # A comprehension does not have the names that only the function around it uses.
    around = frame.f_back
    same = around is not None and around.f_code.co_filename == frame.f_code.co_filename
    return _value_of(expression, around) if same and frame.f_code.co_name.startswith("<") else None
