"""Zero-bubble orders (separate BI and BW) of stages whose replicas shard optimizer state, gradients and
parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.gather import AllGather
from lightning_piper.ops.communication.reduce import ReduceScatter
from lightning_piper.ops.update import Accumulate
from lightning_piper.plan import compile_plans
from lightning_piper.plan.instructions import Run
from lightning_piper.testing.equivalence import run_plans
from tests.dags import zero_bubble
from tests.groups import marked
from tests.models import captured
from tests.plan.programs import Program, dag_of, split
from tests.sharded import (
    LEVELS,
    NAMES,
    distance,
    finished,
    replicate,
    run,
    stages,
    trained_alone,
    trained_in_shards,
)

EPS = 1e-14  # measured: at most 4e-16
GROUPS = [[0, 2], [1, 3]]
by_level = pytest.mark.parametrize("level", [{}, *LEVELS], ids=["none", *NAMES])
by_place = pytest.mark.parametrize("first", [True, False], ids=["replicated first", "ordered first"])


def zero_bubble_program(step: Any, level: dict[str, Any], first: bool, microbatches: int = 4) -> Program:
    """Return ZB-H1 over two stages with two replicas each. With `first`, the replicate comes before the
    orders.
    """
    both, orders = [replicate(GROUPS, **level, bucket_size=0.0002)], zero_bubble(2, microbatches)
    return [*stages(step, GROUPS), *split(microbatches), *(both + orders if first else orders + both)]


@by_place
@by_level
@pytest.mark.parametrize("name", marked(["mlp", "losses", "used_twice"], ["losses"]))
def test_equals_one_device(name: str, level: dict[str, Any], first: bool) -> None:
    model = captured(name, 8, double=True)
    dag = finished(model, zero_bubble_program(model.step, level, first))
    assert {chunk.kind for chunk in dag.of_type(Chunk)} == {"F", "BI", "BW"}
    alone, found = run(model, dag_of(model.step, [])), run(model, dag)
    assert distance(alone, found) < EPS
    executed = run_plans(model, dag)  # type: ignore[arg-type]
    assert all(torch.equal(grad, executed.grads[n]) for n, grad in found.grads.items())
    # The control: the gradients of one microbatch less.
    total = next(t for t in dag.of_type(Accumulate) if len(t.inputs) > 1)
    dag.rewire(total, inputs=total.inputs[1:])
    assert distance(alone, run(model, dag)) > 0.01


@by_place
@by_level
def test_exact_arithmetic_keeps_every_bit(level: dict[str, Any], first: bool) -> None:
    model = captured("exact", 8)
    dag = finished(model, zero_bubble_program(model.step, level, first))
    assert distance(run(model, dag_of(model.step, [])), run(model, dag)) == 0


@by_level
def test_training(level: dict[str, Any]) -> None:
    model = captured("mlp", 8)
    dag = finished(model, zero_bubble_program(model.step, level, first=True))
    expected, found = trained_alone(model, dag), trained_in_shards(model, dag)
    assert expected.keys() == found.keys() and all(
        torch.equal(x, found[name]) for name, x in expected.items()
    )


@by_place
def test_gathers_and_sums(first: bool) -> None:
    """Gradients of inputs need parameters, those of weights do not: BW gathers nothing, and BI sums
    nothing.
    """
    model = captured("mlp", 8)
    dag = finished(model, zero_bubble_program(model.step, LEVELS[2], first))
    assert {
        user.kind
        for gather in dag.of_type(AllGather)
        for user in dag.users(gather)
        if isinstance(user, Chunk)
    } == {"F", "BI"}
    for scatter in dag.of_type(ReduceScatter):
        makers = [scatter]
        while not isinstance(makers[0], Chunk):
            makers = [dag.nodes[i] for node in makers for i, _ in node.reads]  # type: ignore[misc]
        assert {chunk.kind for chunk in makers if isinstance(chunk, Chunk)} == {"BW"}
    runs = [x.label for x in compile_plans(dag)[0].instructions if isinstance(x, Run)]
    assert [label[: label.index("[")] for label in runs] == ["F", "F", "F", "BW", "F", "BW", "BW", "BW"]
