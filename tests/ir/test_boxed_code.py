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
    assert len(made) == 1
    assert other([torch.zeros(2)])[0].tolist() == [0, 0]


def test_what_runs_in_the_place_of_an_operation_does_not_stay_there() -> None:
    graph = doubled()
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.meta[RUNS_KEY] = torch.ops.aten.mul.Tensor
    assert compile_boxed(graph)([torch.full((1,), 3.0)])[0].tolist() == [9]
    assert node.target is torch.ops.aten.add.Tensor
