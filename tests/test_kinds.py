"""Code names kinds of devices and their backends in one file: all else is said by torch of any device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_piper

ROOT = Path(lightning_piper.__file__).parent
ONE = "accelerators/kinds.py"
KINDS = re.compile(r"cuda(?!_graphs)|nccl|xccl|rocm|\b[xh]pu|\bmps", re.IGNORECASE)


def named(tree: ast.AST) -> Iterator[str]:
    """Yield names and strings of code, except for strings that stand alone, as docstrings do, and texts of
    errors.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        texts = [
            x
            for field in ("id", "attr", "name", "arg", "value")
            if isinstance(x := getattr(node, field, None), str)
        ]
        yield from (f"line {getattr(node, 'lineno', 0)}: {text}" for text in texts if KINDS.search(text))
        yield from named(node)


def test_one_file_names_kinds_of_devices() -> None:
    found = {
        str(path.relative_to(ROOT)): list(named(ast.parse(path.read_text()))) for path in ROOT.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names and path != ONE} == {}
    assert len(found[ONE]) > 3


def test_what_is_named_is_found() -> None:
    def of(code: str) -> int:
        return len(list(named(ast.parse(code))))

    assert (
        of("torch.cuda.synchronize()")
        == of("if x.device.type == 'cuda': pass")
        == of("def f(nccl): pass")
        == 1
    )
    assert of("'''As on CUDA.'''\nx = 1  # cuda") == of("raise ValueError('cuda')") == 0
