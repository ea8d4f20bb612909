"""fx graph -> Python function in the boxed convention: one list of arguments, emptied at the start.

The generated code drops every intermediate after its last use, so nothing outlives its consumer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.graph import CodeGen


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
    return torch.fx.GraphModule(constants or torch.nn.Module(), graph).forward
