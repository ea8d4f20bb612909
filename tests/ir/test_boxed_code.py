"""Code of passes, which is generated at its first run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from lightning_piper.ir.boxed_code import RUNS_KEY, compile_boxed


def doubled() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, x)),))
    return graph


def test_code_is_made_once_and_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Graph] = []
    python_code = Graph.python_code

    def counting(graph: Graph, *args: Any, **options: Any) -> Any:
        made.append(graph)
        return python_code(graph, *args, **options)

    monkeypatch.setattr(Graph, "python_code", counting)
    run, other = compile_boxed(doubled()), compile_boxed(doubled())
    assert not made
    for _ in range(2):
        args = [torch.ones(2)]
        assert run(args)[0].tolist() == [2, 2] and not args
    assert other([torch.zeros(2)])[0].tolist() == [0, 0]
    assert len(made) == 1  # the second graph shares the code


def scaled(name: str, factor: float | bool, added: bool = False) -> Graph:
    graph = Graph()
    x = graph.placeholder(name)
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    other = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (y, y if added else other)),))
    return graph


def test_graphs_share_code_if_only_names_differ() -> None:
    """Negative controls: another number, a number of another type that is equal, another reader."""
    runs: list[Any] = [
        compile_boxed(graph)
        for graph in (
            scaled("a", 1.0),
            scaled("b", 1.0),
            scaled("a", 2.0),
            scaled("a", True),
            scaled("a", 1.0, True),
        )
    ]
    found = [run([torch.tensor([3, 4])])[0] for run in runs]
    assert [x.tolist() for x in found] == [[0, 0], [0, 0], [3, 4], [0, 0], [6, 8]]
    assert [x.dtype for x in found] == [*[torch.float32] * 3, torch.int64, torch.float32]
    first, *others = (type(run.__self__).forward for run in runs)
    assert [other is first for other in others] == [True, False, False, False]


def test_shared_code_reads_each_graphs_own_constant() -> None:
    found = []
    for value in (2.0, 5.0):
        constants, graph = torch.nn.Module(), Graph()
        constants.register_buffer("factor", torch.tensor(value))
        x = graph.placeholder("x")
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, graph.get_attr("factor"))),))
        found.append(compile_boxed(graph, constants))
    assert [run([torch.ones(1)])[0].item() for run in found] == [2, 5]


def test_what_runs_in_the_place_of_an_operation_does_not_stay_there() -> None:
    graph = doubled()
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.meta[RUNS_KEY] = torch.ops.aten.mul.Tensor
    assert compile_boxed(graph)([torch.full((1,), 3.0)])[0].tolist() == [9]
    assert node.target is torch.ops.aten.add.Tensor
