"""Compile an fx graph to a Python function with the boxed convention: it empties its list of arguments.

The generated code drops every intermediate after its last use, so no tensor outlives its consumer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.fx.graph import CodeGen

from lightning_piper.common.graph_nodes import new_node
from lightning_piper.ir._torch_functions import FUNCTIONS, without_torch_function

RUNS_KEY = "piper_runs"  # key in an operation's metadata: the function that runs instead of the operation
_making = threading.Lock()  # held while code is generated, because devices of one process are threads
# Operations of a graph -> the generated function. Equal layers, and equal devices of one process, share functions.
_generated: MutableMapping[object, Callable[..., Any]] = weakref.WeakValueDictionary()


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
    _calls_others = False  # whether the code calls functions of users or of other packages

    def recompile(self) -> torch.fx.graph.PythonCode:  # type: ignore[empty-body]
        """Do nothing: torch calls this when the module gets its graph."""

    def run(self, args: list[torch.Tensor], sizes: Sequence[Any] = ()) -> tuple[torch.Tensor, ...]:
        if not self._is_made:
            with _making:
                self._make()
        made: tuple[torch.Tensor, ...]
        if self._calls_others:
            made = self.forward(args, sizes)
        else:
            with without_torch_function():
                made = self.forward(args, sizes)
        return made

    def _make(self) -> None:
        """Generate the code, if no other thread has generated it."""
        if self._is_made:  # another thread has generated the code
            return
        self._calls_others = any(map(_calls_others, self.graph.nodes))
        key = None if self._calls_others else _key(self.graph)
        made = _generated.get(key)
        if made is None:
            # Code is generated from a copy, because other threads may read the graph.
            graph = self.graph
            self._graph = _calling(graph, {} if self._calls_others else FUNCTIONS)
            super().recompile()
            self._graph = graph
            made = type(self).forward  # torch makes a class for each module
            if key is not None:
                _generated[key] = made
        type(self).forward = made
        self._is_made = True


class BoxedCode:
    """A graph and the function that runs it (`compile_boxed`). A call returns both, and makes them if it is the first.

    Args:
        make: Returns the graph.
        constants: See `compile_boxed`.
    """

    def __init__(self, make: Callable[[], torch.fx.Graph], constants: torch.nn.Module | None) -> None:
        # The first call drops `_make`, and all that it refers to.
        self._make: tuple[Callable[[], torch.fx.Graph], torch.nn.Module | None] | None = make, constants
        self._made: tuple[Callable[..., tuple[torch.Tensor, ...]], torch.fx.Graph] | None = None

    def __call__(self) -> tuple[Callable[..., tuple[torch.Tensor, ...]], torch.fx.Graph]:
        with _making:
            if self._make is not None:
                make, constants = self._make
                graph = make()
                self._made, self._make = (compile_boxed(graph, constants), graph), None
        assert self._made is not None
        return self._made


def _calling(graph: torch.fx.Graph, functions: Mapping[Any, Callable[..., Any]]) -> torch.fx.Graph:
    """Return a copy of a graph that calls a function of `RUNS_KEY`, or of `functions`, instead of an operation."""
    made, copies = torch.fx.Graph(graph.owning_module), dict[torch.fx.Node, torch.fx.Node]()
    for node in graph.nodes:
        target = node.meta.get(RUNS_KEY) or functions.get(node.target, node.target)
        args, kwargs = (torch.fx.node.map_arg(x, copies.__getitem__) for x in (node.args, node.kwargs))
        copies[node] = new_node(made, node.op, target, args, kwargs, node.name)
    made.set_codegen(_Boxed())
    return made


def _key(graph: torch.fx.Graph) -> object:
    """Return a key that is equal for two graphs if their code is equal except for the names of variables."""
    numbers = {node: f"%{i}".encode() for i, node in enumerate(graph.nodes)}  # no operation takes bytes
    return tuple(
        (
            node.op,
            None if node.op == "placeholder" else node.target,
            repr(torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)),
        )
        for node in graph.nodes
    )


def _calls_others(node: torch.fx.Node) -> bool:
    """Return whether a node calls a function of a user, or an operation that is not torch's or Piper's. Its code
    may need `__torch_function__`."""
    return RUNS_KEY in node.meta or getattr(node.target, "namespace", "aten") not in (
        "aten",
        "prims",
        "lightning_piper",
    )


def compile_boxed(
    graph: torch.fx.Graph, constants: torch.nn.Module | None = None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that runs a graph. It takes a list of tensors, which it empties, and the graph's
    `sizes`.

    `constants` holds the tensors that the step makes from Python numbers (`torch.tensor(...)`), by the
    graph's names.
    """
    return _Module(constants or torch.nn.Module(), graph).run
