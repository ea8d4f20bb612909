"""The training DAG as a data structure: edges follow what nodes read, and a copy is independent."""

from __future__ import annotations

import dataclasses
from typing import Any

import networkx as nx
import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.update import Update
from lightning_piper.passes import apply_program
from lightning_piper.schedules import one_f_one_b
from lightning_piper.verify.static_check import check
from tests.dags import build, run
from tests.models import captured
from tests.reference import differences


def pipeline() -> TrainingDAG:
    return apply_program(build_dag(captured("mlp").step), one_f_one_b(2, 2))


def chunk(dag: TrainingDAG, region: int, kind: str, start: int = 0) -> Chunk:
    return next(c for c in dag.of_type(Chunk) if c.key == (region, kind) and c.slice.start == start)


def test_data_edges_are_what_nodes_read() -> None:
    dag = pipeline()
    read = {(ref[0], node.id) for node in dag.nodes.values() for ref in node.reads}
    assert read == {(a, b) for a, b, data in dag.graph.edges(data="data") if data}
    assert len(read) > 20 and nx.is_directed_acyclic_graph(dag.graph)


def test_users_readers_and_values() -> None:
    dag = pipeline()
    first = chunk(dag, 0, "F")
    assert [type(user).__name__ for user in dag.users(first)] == ["Chunk", "Send"]
    assert [user.id for user in dag.readers((first.id, 1))] == [chunk(dag, 0, "B").id]
    assert dag.value((first.id, 0)).kind == "activation"
    assert dag.devices() == (0, 1) and len(list(dag.of_type(Send))) == len(list(dag.of_type(Recv))) == 4


def test_rewiring_moves_the_edges_and_keeps_the_order() -> None:
    dag = pipeline()
    reader, other = chunk(dag, 1, "F", 2), chunk(dag, 1, "F", 0)
    old = dag.nodes[reader.inputs[0][0]]
    dag.order(old, reader, 7)
    dag.rewire(reader, inputs=other.inputs)
    assert reader.inputs == other.inputs
    assert dag.graph.edges[other.inputs[0][0], reader.id]["data"]
    assert dag.graph.edges[old.id, reader.id] == {"data": False, "order": 7}
    dag.rewire(other, inputs=())
    assert not dag.graph.has_edge(reader.inputs[0][0], other.id)


def test_substitute_replaces_one_value_everywhere() -> None:
    dag = pipeline()
    metrics = next(dag.of_type(Metrics))
    old, new = metrics.inputs[0], metrics.inputs[1]
    dag.substitute(metrics, old, new)
    assert old not in metrics.inputs and metrics.inputs[:2] == (new, new)


def test_an_order_does_not_hide_data() -> None:
    dag = build_dag(captured("mlp").step)
    first, second = chunk(dag, 0, "F"), chunk(dag, 1, "F")
    dag.order(first, second, 3)
    assert dag.graph.edges[first.id, second.id] == {"data": True, "order": 3}
    dag.order(first, second, 4)  # the first directive that ordered them is remembered
    assert dag.graph.edges[first.id, second.id]["order"] == 3


def test_a_copy_is_independent() -> None:
    dag = build_dag(captured("mlp").step)
    text = str(dag)
    copy = dag.copy()
    assert str(copy) == text
    apply_program(copy, one_f_one_b(2, 2))
    assert str(dag) == text and str(copy) != text
    assert {node.id for node in dag.nodes.values()}.isdisjoint(range(len(dag.nodes), 1000))
    back = copy.copy()
    text = str(copy)
    copy.program.absent["MB"] = {3}
    copy.order(chunk(copy, 0, "F"), chunk(copy, 0, "F", 2), 9)
    copy.remove([next(copy.of_type(StepReport))])
    copy.change(chunk(copy, 0, "F"), devices=(5,))
    assert str(back) == text and back.program.absent == {}


def test_a_copy_goes_on_numbering() -> None:
    dag = build_dag(captured("mlp").step)
    copy = dag.copy()
    copy.program.index = 4
    added = copy.add(Update(inputs=((4, 0),)))
    assert added.id == len(dag.nodes) and added.origin == 4 and added.id not in dag.nodes


def test_the_size_of_a_dag() -> None:
    step = captured("mlp").step
    assert (build_dag(step).size, build_dag(step).program.partial) == (4, False)
    assert (build_dag(step, 3).size, build_dag(step, 3).program.partial) == (3, True)
    assert build_dag(step, 3).code is step.at(3)


def test_forward_comes_before_backward_and_backward_in_reverse() -> None:
    dag = build_dag(captured("gpt").step)
    assert [c.label for c in dag.of_type(Chunk)] == [
        "F[PP=0]",
        "F[PP=1]",
        "F[PP=2]",
        "B[PP=2]",
        "B[PP=1]",
        "B[PP=0]",
    ]


def test_one_update_for_each_bundle_of_parameters() -> None:
    dag = build_dag(captured("tied").step)
    updates = [
        update for update in dag.of_type(Update) if "embed.weight" in dag.value(update.inputs[0]).names
    ]
    assert len(updates) == 1 and len(updates[0].inputs) == 2
    names = [name for update in dag.of_type(Update) for name in dag.value(update.inputs[0]).names]
    assert sorted(names) == sorted(name for name, _ in captured("tied").module.named_parameters())


def test_nodes_are_frozen_and_changed_by_their_dag() -> None:
    dag = build_dag(captured("mlp").step)
    node = next(dag.of_type(Chunk))
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.devices = (0,)  # type: ignore[misc]
    dag.change(node, devices=(0,))
    assert dag.nodes[node.id].devices == (0,)
    with pytest.raises(ValueError, match=r"change cannot set inputs. Use rewire to change what a node reads"):
        dag.change(node, inputs=())
    with pytest.raises(ValueError, match=r"has no field 'peers'\. Give one of outputs, tags, devices"):
        dag.change(node, peers=(1,))


def test_a_node_may_be_removed_before_its_readers_are_rewired() -> None:
    dag = build("mlp")
    forward = chunk(dag, 0, "F")
    again, readers = dag.duplicate(forward), dag.users(forward)
    dag.remove([forward])
    for reader in readers:
        for i in range(len(forward.outputs)):
            dag.substitute(reader, (forward.id, i), (again.id, i))
    check(dag)
    assert differences(run("mlp", dag), run("mlp", build("mlp"))) == []


def test_what_was_read_in_vain_leaves_nothing_behind() -> None:
    dag = build("mlp")
    backward = chunk(dag, 0, "B")
    inputs = backward.inputs
    for wrong in ((999, 0), (inputs[0][0], -1)):
        dag.rewire(backward, inputs=(wrong, *inputs[1:]))
        with pytest.raises(VerificationError, match=rf"reads %{wrong[0]}\.{wrong[1]}, which does not exist"):
            check(dag)
    dag.rewire(backward, inputs=inputs)
    assert set(dag.graph) == dag.nodes.keys()
    check(dag)


@pytest.mark.parametrize(
    "rewrite, says",
    [
        (
            lambda dag, f: dag.rewire(f, inputs=[(0, 0)]),
            r"inputs would have \[\(0, 0\)\]. Give a tuple of pairs",
        ),
        (
            lambda dag, f: dag.rewire(f, inputs=([0, 0],)),
            r"inputs would have \[0, 0\]. Give a tuple of pairs",
        ),
        (lambda dag, f: dag.rewire(f, inputs=(0,)), "inputs would have 0. Give a tuple of pairs"),
        (lambda dag, f: dag.remove([f, f]), r"%0 F\[PP=0\] is not in this DAG"),
        (lambda dag, f: dag.order(f.id, f, 0), "0 is not a node. Give one of dag.nodes"),
        (lambda dag, f: dag.add(f), r"%0 F\[PP=0\] is in the DAG already. Add a new node"),
        (lambda dag, f: dag.add(None), "None is not a node. Add a new node"),
        (lambda dag, f: dag.change(f, devices=[0]), r"devices=\[0\] is not usable. Give a tuple of integers"),
        (lambda dag, f: dag.change(f, kind="Q"), "the step has no pass 'Q' of region 0"),
        (
            lambda dag, f: dag.change(f, kind="B", outputs=()),
            "would have 0 outputs, but pass B of region 0 has ",
        ),
    ],
)
def test_a_rewrite_that_is_none_is_refused_where_it_is_made(rewrite: Any, says: str) -> None:
    dag = build("mlp")
    with pytest.raises(ValueError, match=says):
        rewrite(dag, chunk(dag, 0, "F"))
