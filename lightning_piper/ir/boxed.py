"""fx graph -> Python function in the boxed convention: one list of arguments, emptied at the start.

The generated code drops every intermediate after its last use, so nothing outlives its consumer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.graph import CodeGen

RUNS_KEY = "piper_runs"  # in the metadata of an operation: the function that runs in its place


class _Boxed(CodeGen):
    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = args" if names else ""
        return f"def {self._func_name}(self, args, sizes=()):{unpack}\n    args.clear()"


def compile_boxed(graph: torch.fx.Graph, constants: torch.nn.Module | None = None) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The graph as a function of a list of tensors; the list is empty afterwards.

    `constants` holds the tensors that the step makes from Python numbers (`torch.tensor(...)`), by the graph's names.
    """
    graph.set_codegen(_Boxed())
    stood = {node: node.target for node in graph.nodes if RUNS_KEY in node.meta}
    for node in stood:
        node.target = node.meta[RUNS_KEY]
    made: Callable[..., tuple[torch.Tensor, ...]] = torch.fx.GraphModule(constants or torch.nn.Module(), graph).forward
    for node, target in stood.items():
        node.target = target
    return made
