"""`order`: the nodes that it makes wait, orders that are redundant, and orders that raise an error."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import networkx as nx
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops.order import Barrier
from lightning_piper.passes import complete
from lightning_piper.verify.static_check import check
from tests.dags import b, build, chunk, f, order, place, run, split
from tests.reference import differences


def temporal(dag: TrainingDAG) -> set[tuple[str, str]]:
    """Return the labels of the nodes that temporal edges connect."""
    return {
        (dag.nodes[x].label, dag.nodes[y].label)
        for x, y, by in dag.graph.edges(data="order")
        if by is not None
    }


def waits(dag: TrainingDAG, before: str, after: str) -> bool:
    return nx.has_path(dag.graph, chunk(dag, before).id, chunk(dag, after).id)


def test_each_group_waits_for_the_one_before() -> None:
    free = build("mlp", *place(0, 1), split(3))
    dag = build("mlp", *place(0, 1), split(3), order(f(0, 2), f(0, 0), f(0, 1)))
    assert temporal(dag) == {("F[PP=0,MB=2]", "F[PP=0,MB=0]"), ("F[PP=0,MB=0]", "F[PP=0,MB=1]")}
    assert waits(dag, "F[PP=0,MB=2]", "F[PP=0,MB=1]") and not waits(free, "F[PP=0,MB=2]", "F[PP=0,MB=1]")
    assert dag.graph.number_of_edges() == free.graph.number_of_edges() + 2
    check(dag)
    assert differences(run("mlp", dag), run("mlp", free)) == []


def test_an_edge_remembers_its_directive() -> None:
    dag = build("mlp", split(3), order(f(0, 0), f(0, 1)), order(f(0, 0), f(0, 1), f(0, 2)))
    first, second, third = (chunk(dag, f"F[PP=0,MB={i}]").id for i in range(3))
    assert dag.graph.edges[first, second]["order"] == 1 and dag.graph.edges[second, third]["order"] == 2


def test_members_of_a_group_may_interleave() -> None:
    dag = build("mlp", split(3), order([f(0, 0), f(0, 1)], f(0, 2)))
    assert temporal(dag) == {("F[PP=0,MB=0]", "F[PP=0,MB=2]"), ("F[PP=0,MB=1]", "F[PP=0,MB=2]")}
    assert not waits(dag, "F[PP=0,MB=0]", "F[PP=0,MB=1]") and not waits(dag, "F[PP=0,MB=1]", "F[PP=0,MB=0]")


def test_two_large_groups_are_kept_apart_by_one_barrier() -> None:
    dag = build("mlp", split(4), order([f(0, 0), f(0, 1), f(0, 2)], [f(0, 3), {"PP": 1, "MB": 3}]))
    (barrier,) = dag.of_type(Barrier)
    assert (dag.graph.in_degree(barrier.id), dag.graph.out_degree(barrier.id)) == (3, 3)
    assert barrier.origin == 1
    for before in range(3):
        assert waits(dag, f"F[PP=0,MB={before}]", "F[PP=0,MB=3]") and waits(
            dag, f"F[PP=0,MB={before}]", "B[PP=1,MB=3]"
        )
    assert not waits(dag, "F[PP=0,MB=0]", "F[PP=0,MB=1]")
    assert differences(run("mlp", dag), run("mlp", build("mlp", split(4)))) == []


def test_barriers_are_one_for_each_device() -> None:
    dag = build(
        "mlp", *place(0, 1), split(4), order({"MB": [0, 1], "PASS": "F"}, {"MB": [0, 1], "PASS": "B"})
    )
    assert sorted(barrier.devices for barrier in dag.of_type(Barrier)) == [(0,), (1,)]
    complete(dag)
    check(dag)


def test_a_filter_may_name_several_chunks_of_a_stage() -> None:
    dag = build("experts", *place(0, 1, 2), split(2), order(f(1, 0), f(1, 1), b(1)))
    assert len(list(dag.of_type(Barrier))) == 2
    assert waits(dag, "F[PP=1,EP=1,MB=0]", "F[PP=1,EP=0,MB=1]") and waits(
        dag, "F[PP=1,EP=0,MB=1]", "B[PP=1,EP=1,MB=0]"
    )
    complete(dag)
    check(dag)


def test_an_order_may_cross_devices_where_data_flows() -> None:
    dag = build("mlp", *place(0, 1), split(2), order(f(0, 0), f(1, 0), b(1, 0), b(0, 0)))
    assert ("F[PP=0,MB=0]", "F[PP=1,MB=0]") not in temporal(dag) and (
        "F[PP=1,MB=0]",
        "B[PP=1,MB=0]",
    ) in temporal(dag)
    complete(dag)
    check(dag)


def test_an_order_before_any_place() -> None:
    dag = build("mlp", split(2), order({"MB": 1}, {"MB": 0}))
    assert waits(dag, "B[PP=0,MB=1]", "F[PP=0,MB=0]")
    complete(dag)
    check(dag)


def test_a_pass_that_a_frozen_stage_does_not_have_is_no_mistake() -> None:
    groups = [f(0, 0), f(0, 1), b(0, 0), b(0, 1)]
    dag = build(
        "extractor", *place(0, 1), split(2), order(*groups), order(f(1, 0), f(1, 1), b(1, 0), b(1, 1))
    )
    complete(dag)
    check(dag)
    assert ("F[PP=0,MB=0]", "F[PP=0,MB=1]") in temporal(dag) and ("B[PP=1,MB=0]", "B[PP=1,MB=1]") in temporal(
        dag
    )
    with pytest.raises(DirectiveError, match=r"{PP: 2, MB: 0, PASS: B} matches nothing"):
        build("extractor", *place(0, 1), split(2), order(f(0, 0), b(2, 0)))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            [order(b(0), f(0))],
            "directive 0 (order): field 'filters': this order closes a cycle: F[PP=0]@? -> (data) F[PP=1]@? "
            "-> (data) B[PP=1]@? -> (data) B[PP=0]@? -> (order, directive 0) F[PP=0]@?. Remove or reverse "
            "one of the orders in this cycle",
        ),
        (
            [*place(0, 1), split(2), order(f(1, 0), f(1, 1)), order(f(1, 1), f(1, 0))],
            "directive 4 (order): field 'filters': this order closes a cycle: F[PP=1,MB=0]@1 -> (order, "
            "directive 3) F[PP=1,MB=1]@1 -> (order, directive 4) F[PP=1,MB=0]@1",
        ),
        (
            [
                *place(0, 1),
                split(2),
                order(b(0, 0), f(0, 1)),
                order(f(1, 1), f(1, 0)),
            ],  # each device alone is valid
            "directive 4 (order): field 'filters': this order closes a cycle: F[PP=1,MB=0]@1 -> (data) "
            "B[PP=1,MB=0]@1 -> (data) send@1 -> (data) recv@0 -> (data) B[PP=0,MB=0]@0 -> (order, directive "
            "3) F[PP=0,MB=1]@0 -> (data) send@0 -> (data) recv@1 -> (data) F[PP=1,MB=1]@1 -> (order, "
            "directive 4) F[PP=1,MB=0]@1",
        ),
        (
            [split(2), order([f(0, 0), b(0, 1)], [f(0, 1), b(1, 0)])],  # through a barrier
            "directive 1 (order): field 'filters': this order closes a cycle: ",
        ),
        (
            [*place(0, 1), split(2), order(f(0, 0), f(1, 1))],
            "directive 3 (order): field 'filters': F[PP=0,MB=0] on device 0 would run before F[PP=1,MB=1] "
            "on device 1, but no data flows from one to the other. Name chunks of one device, or a chunk "
            "and a chunk that reads its result",
        ),
        (
            [*place(0, 1), split(2), order(f(1, 0), f(0, 0))],
            "directive 3 (order): field 'filters': F[PP=1,MB=0] on device 1 would run before F[PP=0,MB=0] "
            "on device 0, but no data",
        ),
        (
            [split(2), order(f(0, 0), f(0))],
            "directive 1 (order): field 'filters[1]': F[PP=0,MB=0] is already in group 0. Name each chunk "
            "in one group",
        ),
        (
            [split(2), order(f(0, 0), [f(0, 1), f(0, 2)])],
            "directive 1 (order): field 'filters[1]': {PP: 0, MB: 2, PASS: F} matches nothing. Choose from the step's tags: "
            "MB in {0, 1}; ",
        ),
    ],
)
def test_refused(program: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build("mlp", *program)


def test_the_orders_that_together_are_a_cycle_are_fine_alone() -> None:
    """The control of the third case above."""
    for single in (order(b(0, 0), f(0, 1)), order(f(1, 1), f(1, 0))):
        dag = build("mlp", *place(0, 1), split(2), single)
        complete(dag)
        check(dag)


class Entered(L.LightningModule):
    """A step that enters PP=0, and the other tag, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int = 0) -> torch.Tensor:
        with piper.annotate("X", 0):
            h = batch * 2
        with piper.annotate("PP", 0):
            h = self.first(h).relu()
        with piper.annotate("PP", 1):
            h = self.second(h)
        with piper.annotate("X", 0):
            h = h * self.second.bias
        with piper.annotate("PP", 0):
            return (h * self.first.bias).square().mean()


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ([{"PP": 0, "PASS": "F"}, {"PP": 1, "PASS": "F"}], r"The step enters PP=0 at .* again at"),
        (
            [{"PP": 1, "PASS": "B"}, {"PP": 1, "PASS": "F"}],
            r"F\[PP=1\]@\?\. Remove or reverse one of the orders",
        ),
    ],
)
def test_a_step_is_blamed_for_a_cycle_only_if_the_order_names_its_parts(
    filters: list[Any], says: str
) -> None:
    with pytest.raises(DirectiveError, match=says):
        piper.compile(Entered(), torch.randn(4, 4), [piper.Order(filters=filters)])
