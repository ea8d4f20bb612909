"""Overlap groups: the orders of a group take turns, so that one computes while the other communicates."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from lightning_piper.directives import Order, Place, Split
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.update import Accumulate
from lightning_piper.plan import check_plans, compile_plans, global_order
from lightning_piper.plan.instructions import Run
from lightning_piper.plan.order import priority
from lightning_piper.plan.overlap import heights
from lightning_piper.simulate import Link, Network, simulate
from tests.dags import b, build, f, run
from tests.models import captured
from tests.plan.programs import dag_of
from tests.reference import differences, plain
from tests.simulate.programs import chain

# Region 1 runs on device 1, between two regions of device 0, as experts behind an all-to-all do.
AROUND = [Place(filter={"PP": [0, 2]}, devices=[0]), Place(filter={"PP": 1}, devices=[1]),
          Split(filter={}, dim_name="MB", num_microbatches=2)]  # fmt: skip
SIDES = [0, 2]


def both(kind: str, mb: int) -> dict[str, Any]:
    """A filter for the regions before and after the middle one, for one pass of one microbatch."""
    return {"PP": SIDES, "MB": mb, "PASS": kind}


PLAIN = [Order(filters=[both("F", 0), both("F", 1), both("B", 0), both("B", 1)])]
OVERLAPPED = [Order(filters=[[both("F", 0), both("F", 1)], [both("B", 0), both("B", 1)]])]


def labels(program: list[Any], device: int = 0) -> list[str]:
    plans = compile_plans(dag_of(chain(3, 2), program))
    check_plans(plans)
    return [i.label for i in plans[device].instructions if isinstance(i, Run)]


def test_microbatches_take_turns_around_communication() -> None:
    assert labels(AROUND + OVERLAPPED) == [
        "F[PP=0,MB=0]", "F[PP=0,MB=1]", "F[PP=2,MB=0]", "F[PP=2,MB=1]",
        "B[PP=2,MB=0]", "B[PP=2,MB=1]", "B[PP=0,MB=0]", "B[PP=0,MB=1]",
    ]  # fmt: skip
    assert labels(AROUND + PLAIN)[:4] == ["F[PP=0,MB=0]", "F[PP=2,MB=0]", "F[PP=0,MB=1]", "F[PP=2,MB=1]"]


def test_overlap_makes_the_step_shorter() -> None:
    """What is in the middle takes 1 (B: 2) and each message 1/2: alone, a microbatch waits for 2 (3) units,
    which the other now fills with its own first half.

    plain       F0 .  .  F2 F0 .  .  F2 B2 ... overlapped  F0 F0 .  F2 F2 B2 ...
    """
    found = {}
    for name, order in (("plain", PLAIN), ("overlapped", OVERLAPPED)):
        dag = dag_of(chain(3, 2), AROUND + order)
        found[name] = simulate(
            dag, compile_plans(dag), {"F": 1, "B": 2}, Network(Link(latency=Fraction(1, 2)))
        )
    assert (found["plain"].step_time, found["overlapped"].step_time) == (22, 14)
    assert found["plain"].devices[0].busy == found["overlapped"].devices[0].busy == 12


def test_a_forward_and_a_backward_pass_take_turns() -> None:
    """Device 0 begins and ends the model; the forward pass of one microbatch runs along the backward pass of
    the other.
    """
    pair = [Order(filters=[both("F", 0), [both("F", 1), both("B", 0)], both("B", 1)])]
    assert labels(AROUND + pair) == [
        "F[PP=0,MB=0]", "F[PP=2,MB=0]",
        "F[PP=0,MB=1]", "B[PP=2,MB=0]", "F[PP=2,MB=1]", "B[PP=0,MB=0]",
        "B[PP=2,MB=1]", "B[PP=0,MB=1]",
    ]  # fmt: skip


@pytest.mark.parametrize("group", [[both("F", 0), both("F", 1)], [both("F", 1), both("F", 0)]])
def test_the_order_in_a_group_follows_the_dag_and_not_the_spelling(group: list[Any]) -> None:
    assert labels([*AROUND, Order(filters=[group, {"PP": SIDES, "PASS": "B"}])])[:2] == [
        "F[PP=0,MB=0]",
        "F[PP=0,MB=1]",
    ]


def test_a_turn_gives_way_to_what_it_waits_for() -> None:
    """The lanes of device 0 would take turns F0[1], B2[0], but an order on the way lets B2[0] wait for
    F2[1].
    """
    late = [
        Order(filters=[[both("F", 0), both("F", 1), both("B", 0)], both("B", 1)]),
        Order(filters=[f(2, 1), b(2, 0)]),
    ]
    found = labels(AROUND + late)
    assert found.index("F[PP=2,MB=1]") < found.index("B[PP=2,MB=0]")
    assert len(found) == 8


def test_one_filter_keeps_the_default_order() -> None:
    """The control: chunks of one filter are one lane, and a microbatch waits for its messages."""
    one = [Order(filters=[{"PP": SIDES, "PASS": "F"}, {"PP": SIDES, "PASS": "B"}])]
    assert labels(AROUND + one)[:4] == ["F[PP=0,MB=0]", "F[PP=2,MB=0]", "F[PP=0,MB=1]", "F[PP=2,MB=1]"]


@pytest.mark.parametrize("order", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
def test_overlap_does_not_change_a_bit(order: list[Any]) -> None:
    dag = build("gpt", *AROUND, *order)
    assert differences(run("gpt", dag), plain(captured("gpt"), [2, 2])) == []


def test_groups_one_after_another_each_take_turns() -> None:
    step = chain(3, 16)
    for count in (8, 16):
        groups = [[both("F", mb), both("F", mb + 1)] for mb in range(0, count, 2)]
        head = [*AROUND[:2], Split(filter={}, dim_name="MB", num_microbatches=count)]
        dag = dag_of(step, [*head, Order(filters=[*groups, {"PASS": "B", "PP": SIDES}])])
        order = [
            node.label
            for node in global_order(dag)
            if isinstance(node, Chunk) and node.devices == (0,) and node.kind == "F"
        ]
        assert order == [f"F[PP={s},MB={mb + i}]" for mb in range(0, count, 2) for s in SIDES for i in (0, 1)]


def test_what_chunks_wait_for_is_sent_before_sums_that_only_the_optimizer_waits_for() -> None:
    groups = [[0, 2], [1, 3]]
    program = [*(Place(filter={"PP": i}, devices=group) for i, group in enumerate(groups)),
               {"op": "replicate", "filter": {}, "devices": groups, "bucket_size": 1e-6}]  # fmt: skip
    dag = dag_of(chain(2, 2), program)
    height = heights(dag)
    sends = [node for node in dag.of_type(Send) if dag.value(node.inputs[0]).kind == "cotangent"]
    sums = [node for node in dag.of_type(AllReduce) if dag.value(node.inputs[0]).kind == "grad"]
    assert len(sends) == 1 and sums
    assert max(priority(dag, send, height[send.id]) for send in sends) < min(
        priority(dag, s, height[s.id]) for s in sums
    )
    order = [node.id for node in global_order(dag)]
    last = max(chunk.id for chunk in dag.of_type(Chunk) if chunk.devices == (1, 3))
    following = [dag.nodes[i] for i in order[order.index(last) + 1 :] if dag.nodes[i].devices == (1, 3)]
    kinds = [type(node) for node in following]
    assert kinds.index(Send) < kinds.index(Accumulate) < kinds.index(AllReduce)


def test_heights_count_the_chunks_of_the_longest_path() -> None:
    dag = dag_of(chain(3, 2), AROUND)
    height = heights(dag)
    by_label = {chunk.label: height[chunk.id] for chunk in dag.of_type(Chunk)}
    assert [by_label[f"{kind}[PP={i},MB=0]"] for kind in "FB" for i in range(3)] == [5, 4, 3, 0, 1, 2]
    assert all(height[a] >= height[c] + isinstance(dag.nodes[c], Chunk) for a, c in dag.graph.edges)
    assert set(height) == set(dag.nodes)
