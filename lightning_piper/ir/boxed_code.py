"""Compile an fx graph to a Python function with the boxed convention: it empties its list of arguments.

The generated code drops every intermediate after its last use, so no tensor outlives its consumer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.graph import CodeGen

RUNS_KEY = "piper_runs"  # key in an operation's metadata: the function that runs instead of the operation
_making = threading.Lock()  # held while code is generated, because devices of one process are threads


class _Boxed(CodeGen):
    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = args" if names else ""
        return f"def {self._func_name}(self, args, sizes=()):{unpack}\n    args.clear()"


class _Module(torch.fx.GraphModule):
    """A graph that generates its code on its first run: a process runs only few passes at few sizes."""

    _is_made = False

    def recompile(self) -> torch.fx.graph.PythonCode:  # type: ignore[empty-body]
        """Do nothing: torch calls this when the module gets its graph."""

    def run(self, args: list[torch.Tensor], sizes: Sequence[Any] = ()) -> tuple[torch.Tensor, ...]:
        if not self._is_made:
            with _making:
                self._make()
        made: tuple[torch.Tensor, ...] = self.forward(args, sizes)
        return made

    def _make(self) -> None:
        """Generate the code, if no other thread has generated it."""
        if self._is_made:  # another thread has generated the code meanwhile
            return
        # The generated code calls the functions of `RUNS_KEY`. The graph gets its own targets back.
        stood = {node: node.target for node in self.graph.nodes if RUNS_KEY in node.meta}
        for node in stood:
            node.target = node.meta[RUNS_KEY]
        super().recompile()
        for node, target in stood.items():
            node.target = target
        self._is_made = True


def compile_boxed(
    graph: torch.fx.Graph, constants: torch.nn.Module | None = None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that runs a graph. It takes a list of tensors, which it empties, and the graph's
    `sizes`.

    `constants` holds the tensors that the step makes from Python numbers (`torch.tensor(...)`), by the
    graph's names.
    """
    graph.set_codegen(_Boxed())
    return _Module(constants or torch.nn.Module(), graph).run
