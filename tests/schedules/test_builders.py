"""For each builder, the graph of its program computes what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.directives import Split, accumulating
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.schedules import (
    dualpipe,
    dualpipev,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    v_half,
    v_min,
    zb_h2,
    zbv,
    zero_bubble,
)
from lightning_piper.testing import Case, Spec, case
from lightning_piper.testing.equivalence import assert_same, run_interpreter, run_plans
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.groups import marked

BUILDERS = [
    gpipe,
    one_f_one_b,
    zero_bubble,
    zb_h2,
    interleaved_one_f_one_b,
    zbv,
    v_half,
    v_min,
    dualpipev,
    dualpipe,
]
STAGES, TIMES = (2, 4, 8), (2, 3, 4)


def chain(stages: int, microbatches: int, exact: bool = False) -> Case:
    """A model of `stages` stages, of which the first and the last share a weight, with one sample for each
    microbatch.
    """
    middle = ("residual", "linear") * (stages // 2)
    return case(Spec(("tied", *middle[: stages - 2], "tied"), tuple(range(stages)), exact), microbatches)


def finished(one: Case, builder: Callable[..., Any], stages: int, microbatches: int) -> TrainingDAG:
    dag = apply_program(build_dag(one.step), builder(stages, microbatches))
    complete(dag)
    return dag


def single(one: Case, microbatches: int) -> Outcome:
    return interpret(
        accumulating(one.step, [Slice(i, i + 1) for i in range(microbatches)]), one.tensors, one.leaves
    )


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("stages", marked(STAGES, STAGES[:2]))
@pytest.mark.parametrize("times", TIMES)
def test_the_static_check_passes_and_no_plan_deadlocks(
    builder: Callable[..., Any], stages: int, times: int
) -> None:
    dag = finished(chain(stages, times * stages), builder, stages, times * stages)
    check(dag, final=True)
    check_plans(compile_plans(dag))


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("stages", marked(STAGES, STAGES[:2]))
@pytest.mark.parametrize("times", TIMES)
def test_the_result_is_that_of_one_device(builder: Callable[..., Any], stages: int, times: int) -> None:
    """Bit for bit, except where a stage has two device groups, whose sums are added up: then in exact
    arithmetic.
    """
    count = times * stages
    one = chain(stages, count, exact=builder is dualpipe)
    dag = finished(one, builder, stages, count)
    outcome = run_interpreter(one, dag)
    assert_same(single(one, count), outcome, "bitwise")
    assert_same(outcome, run_plans(one, dag), "bitwise")


def test_two_homes_re_associate_within_rounding() -> None:
    one = chain(4, 8)
    outcome = run_interpreter(one, finished(one, dualpipe, 4, 8))
    assert_same(single(one, 8), outcome, "float64", 64)
    with pytest.raises(AssertionError, match="gradient"):  # the control: in general the bits do differ
        assert_same(single(one, 8), outcome, "bitwise")


def test_a_home_left_out_would_show() -> None:
    """The control of the comparison: an update that forgets the other direction."""
    one = chain(2, 4, exact=True)
    dag = finished(one, dualpipe, 2, 4)
    for update in dag.of_type(Update):
        own = [ref for ref in update.inputs if isinstance(dag.nodes[dag.source(ref)[0]], Accumulate)]
        dag.rewire(update, inputs=tuple(own[:1]))
    with pytest.raises(AssertionError, match="gradient"):
        assert_same(single(one, 4), run_interpreter(one, dag), "exact")


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_smaller_last_batch_runs_with_fewer_microbatches(builder: Callable[..., Any]) -> None:
    """Three samples for eight microbatches: those that are not there are left out of places and orders."""
    full = chain(4, 8)
    dag = apply_program(build_dag(full.step, 3), builder(4, 8))
    complete(dag)
    check(dag, final=True)
    check_plans(compile_plans(dag))
    assert [d for d in builder(4, 8) if isinstance(d, Split)] and dag.microbatches() == (
        Slice(0, 1),
        Slice(1, 2),
        Slice(2, 3),
    )
