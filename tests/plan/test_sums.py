"""Sums add their terms in the order of the node, each as soon as it can be added."""

from __future__ import annotations

from lightning_piper.ops.update import Accumulate
from lightning_piper.plan import Plan, check_plans, compile_plans
from lightning_piper.plan.instructions import Add, Run
from tests.models import captured
from tests.plan.programs import Program, dag_of, order, place, split


def events(program: Program, stage: int) -> tuple[Plan, list[str]]:
    """The plan of a stage, and its chunks and additions in order. Additions are written as `0+1` and `+2`,
    where the numbers are the microbatches of the terms.
    """
    step = captured("mlp").step
    dag = dag_of(step, place(step, 2) + split(4) + program)
    plans = compile_plans(dag)
    check_plans(plans)
    total = next(n for n in dag.of_type(Accumulate) if n.tags["PP"] == stage)
    of = {source: str(i) for i, (source, _) in enumerate(total.inputs)}
    made: dict[int | None, str] = {}
    shown = []
    for i in plans[stage].instructions:
        if isinstance(i, Run):
            made.update(dict.fromkeys(i.writes, of.get(i.node, "?")))
            shown.append(f"{i.key[1]}{i.slice.start}")
        elif isinstance(i, Add):
            shown.append(
                "+".join(made[read.slot] for read in i.reads)
                if not i.in_place
                else f"+{made[i.reads[0].slot]}"
            )
            made[i.writes[0]] = "sum"
    return plans[stage], shown


def test_terms_are_added_as_they_come() -> None:
    _, shown = events(order(1, "F0 B0 F1 B1 F2 B2 F3 B3"), 1)
    assert shown == ["F0", "B0", "F1", "B1", "0+1", "F2", "B2", "+2", "F3", "B3", "+3"]


def test_a_term_that_comes_too_early_is_held() -> None:
    _, shown = events(order(1, "F0 F1 F2 F3 B2 B1 B0 B3"), 1)
    assert shown == ["F0", "F1", "F2", "F3", "B2", "B1", "B0", "0+1", "+2", "B3", "+3"]


def test_the_first_two_terms_make_new_tensors_and_the_sum_is_changed_in_place_from_then_on() -> None:
    plan, _ = events(order(1, "F0 B0 F1 B1 F2 B2 F3 B3"), 1)
    first, *rest = [i for i in plan.instructions if isinstance(i, Add)]
    assert not first.in_place and first.into not in {read.slot for read in first.reads}
    assert all(add.in_place and add.into == first.into for add in rest)
