"""The global order, and the places of sends and receives in it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan import Plan, check_plans, compile_plans
from lightning_piper.plan.instructions import Irecv, Run, SendInstruction, WaitSend, WaitWork
from lightning_piper.plan.order import global_order
from tests.models import captured
from tests.plan.programs import dag_of, one_f_one_b, order, pipeline, place, plans_of, split


def labels(plan: Plan) -> list[str]:
    return [i.label for i in plan.instructions if isinstance(i, Run)]


def index(plan: Plan, kind: type, number: int = 0) -> int:
    """The index in the plan of the number-th instruction of a kind."""
    return [i for i, instruction in enumerate(plan.instructions) if isinstance(instruction, kind)][number]


def test_without_an_order_all_forwards_come_first_slice_by_slice() -> None:
    plan = plans_of("mlp", 1, 2, ordered=False)[0]
    assert labels(plan) == ["F[PP=0,MB=0]", "F[PP=1,MB=0]", "F[PP=0,MB=1]", "F[PP=1,MB=1]",
                            "B[PP=1,MB=0]", "B[PP=0,MB=0]", "B[PP=1,MB=1]", "B[PP=0,MB=1]"]  # fmt: skip


def test_gradients_of_weights_come_when_no_other_chunk_can() -> None:
    """Only the halves of stage 1 are split; both have one device, so that nothing but the priority
    decides.
    """
    halves: list[dict[str, Any]] = [
        {"op": "order", "filters": [{"PP": 1, "PASS": "F"}, {"PP": 1, "PASS": "BI"}]}
    ]
    plan = compile_plans(dag_of(captured("mlp").step, split(2) + halves))[0]
    assert labels(plan)[4:] == [
        "BI[PP=1,MB=0]",
        "B[PP=0,MB=0]",
        "BI[PP=1,MB=1]",
        "B[PP=0,MB=1]",
        "BW[PP=1,MB=0]",
        "BW[PP=1,MB=1]",
    ]
    first = [{"op": "order", "filters": [{"PP": 1, "MB": 0, "PASS": "BW"}, {"PP": 1, "MB": 1, "PASS": "F"}]}]
    plan = compile_plans(dag_of(captured("mlp").step, split(2) + first))[0]
    assert labels(plan) == [
        "F[PP=0,MB=0]",
        "F[PP=1,MB=0]",
        "F[PP=0,MB=1]",
        "BI[PP=1,MB=0]",
        "B[PP=0,MB=0]",
        "BW[PP=1,MB=0]",
        "F[PP=1,MB=1]",
        "B[PP=1,MB=1]",
        "B[PP=0,MB=1]",
    ]


def test_an_order_is_kept() -> None:
    step = captured("mlp").step
    plans = compile_plans(dag_of(step, place(step, 2) + split(3) + order(1, "F2 B2 F0 F1 B1 B0")))
    assert labels(plans[1]) == [f"{c[0]}[PP=1,MB={c[1]}]" for c in ("F2", "B2", "F0", "F1", "B1", "B0")]
    check_plans(plans)


def test_every_edge_is_respected() -> None:
    dag = pipeline("tied", 3, 4)
    position = {node.id: i for i, node in enumerate(global_order(dag))}
    assert len(position) == len(dag.nodes)
    assert all(position[a] < position[b] for a, b in dag.graph.edges)


def test_a_cycle_is_named() -> None:
    dag = pipeline("mlp", 1, 2).copy()
    first, last = min(dag.of_type(Chunk), key=lambda c: c.id), max(dag.of_type(Chunk), key=lambda c: c.id)
    dag.graph.add_edge(last.id, first.id, data=False, order=7)
    with pytest.raises(VerificationError, match=rf"cycle: .*%{first.id} F\[PP=0,MB=0\] ->"):
        global_order(dag)


def test_messages_are_posted_in_the_order_of_the_channel_also_when_they_are_needed_in_another() -> None:
    step = captured("mlp").step
    plans = compile_plans(dag_of(step, place(step, 2) + split(2) + order(0, "F0 F1") + order(1, "F1 F0")))
    sent = [i.node for i in plans[0].instructions if isinstance(i, SendInstruction)]
    irecvs = [i for i in plans[1].instructions if isinstance(i, Irecv)]
    waits = [i.node for i in plans[1].instructions if isinstance(i, WaitWork) and i.label == "recv"]
    assert [irecv.message for irecv in irecvs] == sent
    assert waits == [irecvs[1].node, irecvs[0].node]
    check_plans(plans)


def test_a_receive_is_posted_one_chunk_before_it_is_waited_for() -> None:
    plan = plans_of("mlp", 2, 4)[1]
    runs = [i for i, instruction in enumerate(plan.instructions) if isinstance(instruction, Run)]
    for number in range(1, 4):
        between = range(index(plan, Irecv, number), index(plan, WaitWork, number))
        assert len(set(between) & set(runs)) == 1


def test_a_send_follows_its_chunk_at_once() -> None:
    plan = plans_of("mlp", 2, 4)[1]
    made = {slot: i for i, instruction in enumerate(plan.instructions) for slot in instruction.writes}
    for i, instruction in enumerate(plan.instructions):
        if isinstance(instruction, SendInstruction):
            between = plan.instructions[made[instruction.reads[0].slot] + 1 : i]
            assert {type(x).__name__ for x in between} <= {"Record", "WaitEvent"}


def test_a_send_is_let_go_when_an_answer_shows_that_it_arrived() -> None:
    first, last = plans_of("mlp", 2, 4).values()
    waits = [i for i, x in enumerate(first.instructions) if isinstance(x, WaitWork) and x.label == "recv"]
    retired = [i for i, x in enumerate(first.instructions) if isinstance(x, WaitSend)]
    sends = [x.node for x in first.instructions if isinstance(x, SendInstruction)]
    assert [x.node for x in first.instructions if isinstance(x, WaitSend)] == sends
    assert all(wait < wait_send for wait, wait_send in zip(waits, retired, strict=True))
    # Nothing answers the last gradients, so these are waited for at the end.
    assert [type(x) for x in last.instructions[-2:]] == [WaitSend, WaitSend]


def test_plans_grow_with_the_microbatches_and_no_faster() -> None:
    step = captured("mlp", 300).step
    lengths = []
    for microbatches in (100, 200, 300):
        plans = compile_plans(
            dag_of(step, place(step, 2) + split(microbatches) + one_f_one_b(2, microbatches))
        )
        check_plans(plans)
        lengths.append([len(plan.instructions) for plan in plans.values()])
    assert [c - b for b, c in zip(*lengths[1:], strict=True)] == [
        b - a for a, b in zip(*lengths[:2], strict=True)
    ]


def test_a_node_without_device_is_refused() -> None:
    dag = pipeline("mlp", 1, 1).copy()
    dag.change(next(dag.of_type(Chunk)), devices=())
    with pytest.raises(VerificationError, match=r"%0 F\[PP=0\] has no device"):
        compile_plans(dag)


def test_a_value_that_is_elsewhere_is_refused() -> None:
    dag = pipeline("mlp", 1, 1).copy()
    dag.change(next(dag.of_type(Chunk)), devices=(1,))
    with pytest.raises(
        VerificationError, match=r"on device 0 reads %0\.\d F\[PP=0\], which is on device 1 only"
    ):
        compile_plans(dag)
