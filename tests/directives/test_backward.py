"""Split backward passes: how orders split them, the resulting graph, and orders that contradict each other."""

from __future__ import annotations

import re
from typing import Any

import networkx as nx
import pytest

from examples.custom_directive import Checkpoint
from lightning_piper.directives import Order, Place, Replicate, Split
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.plan.instructions import Run
from lightning_piper.testing import POOL, case, check_program
from lightning_piper.verify.static_check import check
from tests.dags import Fixed, b, bi, build, bw, chunk, f, order, place, run, split, zero_bubble
from tests.groups import marked
from tests.models import CASES
from tests.reference import differences


def backward(dag: TrainingDAG, stage: int) -> list[str]:
    """Return the backward chunks of a stage, by microbatch: `BI0 BW0 B1` are the split passes of microbatch 0
    and the whole pass of microbatch 1.
    """
    chunks = [c for c in dag.of_type(Chunk) if c.kind != "F" and c.tags["PP"] == stage]
    return [f"{c.kind}{c.tags['MB']}" for c in sorted(chunks, key=lambda c: (c.tags["MB"], c.kind))]


def runs(dag: TrainingDAG) -> list[str]:
    """Return the chunks of each device, in order, such as `F0 BI0 BW0`."""
    plans = compile_plans(dag)
    check_plans(plans)
    found = [
        [dag.nodes[x.node] for x in plan.instructions if isinstance(x, Run)]
        for _, plan in sorted(plans.items())
    ]
    return [" ".join(f"{c.kind}{c.tags['MB']}" for c in chunks if isinstance(c, Chunk)) for chunks in found]


def reads(dag: TrainingDAG, label: str) -> list[tuple[str, str]]:
    return [(dag.nodes[ref[0]].label, dag.value(ref).label) for ref in chunk(dag, label).inputs]


def test_an_order_that_names_a_half_splits_the_backward() -> None:
    whole = build("mlp", *place(0, 1), split(2))
    dag = build("mlp", *place(0, 1), split(2), order(f(1, 0), bi(1, 0), bw(1, 0)))
    assert [backward(dag, stage) for stage in (0, 1)] == [["B0", "B1"], ["BI0", "BW0", "B1"]]
    assert reads(dag, "BI[PP=1,MB=0]") == [("F[PP=1,MB=0]", "saved:BI"), ("F[PP=1,MB=0]", "saved:BI,BW")]
    assert reads(dag, "BW[PP=1,MB=0]") == [("BI[PP=1,MB=0]", "saved:BW"), ("F[PP=1,MB=0]", "saved:BW"),
                                           ("F[PP=1,MB=0]", "saved:BI,BW")]  # fmt: skip
    inputs, weights = chunk(dag, "BI[PP=1,MB=0]"), chunk(dag, "BW[PP=1,MB=0]")
    assert inputs.id == chunk(whole, "B[PP=1,MB=0]").id and (inputs.origin, weights.origin) == (3, 3)
    assert (weights.devices, weights.placed_by, weights.slice) == ((1,), 1, inputs.slice)
    assert [type(user) for user in dag.users(inputs)] == [Send, Chunk] and [
        type(u) for u in dag.users(weights)
    ] == [Accumulate]
    check(dag)
    assert differences(run("mlp", dag), run("mlp", whole)) == []


def test_sums_keep_the_order_of_the_slices() -> None:
    dag = build("mlp", *place(0, 1), split(4), order(bi(1, 2), bw(1, 2), b(1, 3)), order(bw(0, 1), b(0, 0)))
    for region in (0, 1):
        (total,) = [a for a in dag.of_type(Accumulate) if a.tags["PP"] == region]
        terms = [dag.nodes[ref[0]] for ref in total.inputs]
        assert [term.slice.start for term in terms if isinstance(term, Chunk)] == [0, 1, 2, 3]
        assert {term.label for term in terms} == {
            0: {"B[PP=0,MB=0]", "BW[PP=0,MB=1]", "B[PP=0,MB=2]", "B[PP=0,MB=3]"},
            1: {"B[PP=1,MB=0]", "B[PP=1,MB=1]", "BW[PP=1,MB=2]", "B[PP=1,MB=3]"},
        }[region]
    complete(dag)
    check(dag, final=True)
    assert differences(run("mlp", dag), run("mlp", build("mlp", split(4)))) == []


HALVED = [name for name, c in CASES.items() if c.size >= 4]


@pytest.mark.parametrize(
    "name", marked(HALVED, ["mlp", "tied", "frozen", "reentered", "dropout", "experts", "losses"])
)
def test_a_schedule_may_name_both_halves_of_every_stage(name: str) -> None:
    """First stages, frozen stages, stages without weights, re-entered and nested ones: all of them."""
    stages = sorted({c.tags["PP"] for c in build(name).of_type(Chunk) if "PP" in c.tags})
    groups = [{"PASS": "F"}, {"PASS": "BI"}, {"PASS": "BW"}]
    dag = build(name, split(2), order(*groups))
    assert not any(c.kind == "B" for c in dag.of_type(Chunk))
    complete(dag)
    check(dag, final=True)
    check_plans(compile_plans(dag))
    assert differences(run(name, dag), run(name, build(name, split(2)))) == []
    if stages and name != "reentered":  # by its stages its order would be a circle
        piped = build(name, *place(*stages), split(2), *zero_bubble(len(stages), 2))
        complete(piped)
        check(piped, final=True)
        check_plans(compile_plans(piped))
        assert differences(run(name, piped), run(name, build(name, split(2)))) == []


def test_the_order_of_the_halves_is_kept() -> None:
    dag = build("mlp", *place(0, 1), split(3), *zero_bubble(2, 3))
    complete(dag)
    assert runs(dag) == ["F0 F1 F2 BW0 BW1 BW2", "F0 BI0 F1 BI1 F2 BW0 BI2 BW1 BW2"]


def test_a_half_that_is_not_named_comes_by_the_default_order() -> None:
    dag = build("mlp", *place(0, 1), split(2), order(f(1, 0), bi(1, 0), f(1, 1), bi(1, 1)))
    complete(dag)
    check(dag, final=True)
    assert runs(dag)[1] == "F0 BI0 F1 BI1 BW0 BW1"


def test_naming_the_half_that_a_stage_does_not_have() -> None:
    first = build("mlp", split(2), order(bi(0, 0), bi(0, 1)))
    assert [backward(first, stage) for stage in (0, 1)] == [["BW0", "BW1"], ["B0", "B1"]]
    bare = build("residual", split(2), order(bw(1, 0), bw(1, 1)))
    assert backward(bare, 1) == ["BI0", "BI1"]
    frozen = build("extractor", split(2), order(f(0, 0), bi(0, 0), bw(0, 0), f(0, 1)))
    assert backward(frozen, 0) == []
    for name, dag in (("mlp", first), ("residual", bare), ("extractor", frozen)):
        complete(dag)
        check(dag, final=True)
        assert differences(run(name, dag), run(name, build(name, split(2)))) == []


def test_a_list_of_halves_is_one_group() -> None:
    dag = build("mlp", split(2), order({"MB": 0, "PASS": ["BI", "BW"]}, {"MB": 1, "PASS": ["BI", "BW"]}))
    assert [backward(dag, stage) for stage in (0, 1)] == [["BW0", "BW1"], ["BI0", "BW0", "BI1", "BW1"]]
    ancestors = nx.ancestors(dag.graph, chunk(dag, "BI[PP=1,MB=1]").id)
    assert {
        chunk(dag, label).id for label in ("BW[PP=0,MB=0]", "BI[PP=1,MB=0]", "BW[PP=1,MB=0]")
    } <= ancestors
    complete(dag)
    check(dag, final=True)


def test_a_list_with_the_whole_takes_what_there_is() -> None:
    """B, BI or BW: whatever the microbatch has; so it splits nothing."""
    dag = build(
        "mlp", split(2), order(f(1, 0), bi(1, 0)), order(f(1, 1), {"PP": 1, "PASS": ["B", "BI", "BW"]})
    )
    assert backward(dag, 1) == ["BI0", "BW0", "B1"]
    after = {dag.nodes[i].label for i in dag.graph.successors(chunk(dag, "F[PP=1,MB=1]").id)}
    assert after >= {"B[PP=1,MB=1]", "BI[PP=1,MB=0]", "BW[PP=1,MB=0]"}


def test_any_pass_is_no_demand_for_halves() -> None:
    dag = build("mlp", split(2), order({"MB": 0, "PASS": "*"}, {"MB": 1}))
    assert [backward(dag, stage) for stage in (0, 1)] == [["B0", "B1"], ["B0", "B1"]]


def test_one_half_waits_for_another_device_only_as_far_as_data_demands() -> None:
    """Stage 0's backward needs BI of stage 1, not BW."""
    dag = build("mlp", *place(0, 1), split(1), order(bi(1, 0), bw(0, 0)))
    complete(dag)
    check(dag)
    says = "BW[PP=1,MB=0] on device 1 would run before BW[PP=0,MB=0] on device 0, but no data"
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build("mlp", *place(0, 1), split(1), order(bw(1, 0), bw(0, 0)))


def test_transfers_carry_the_gradients_of_inputs() -> None:
    dag = build("mlp", *place(0, 1), split(2), *zero_bubble(2, 2))
    sent = [
        dag.nodes[send.inputs[0][0]].label
        for send in dag.of_type(Send)
        if dag.value(send.inputs[0]).kind == "cotangent"
    ]
    assert sent == ["BI[PP=1,MB=0]", "BI[PP=1,MB=1]"]
    assert all(dag.value(recv.inputs[0]).kind != "saved" for recv in dag.of_type(Recv))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            [split(2), order(f(1, 0), b(1, 0)), order(f(1, 1), bi(1, 0))],
            "directive 2 (order): field 'filters[1]': {PP: 1, MB: 0, PASS: BI} splits B[PP=1,MB=0] into BI and BW, but "
            "directive 1 orders it as B. Name BI and BW in all orders, or B in all of them",
        ),
        (
            [
                *place(0, 1),
                split(2),
                order(b(1, 0), b(0, 0)),
                order(f(0, 1), bw(0, 0)),
            ],  # the data requires this order anyway
            "directive 4 (order): field 'filters[1]': {PP: 0, MB: 0, PASS: BW} splits B[PP=0,MB=0] into BI and BW, but "
            "directive 3 orders it",
        ),
        (
            [split(2), order({"MB": 0}, {"MB": 1}), order(bi(1, 0), bi(1, 1))],
            "directive 2 (order): field 'filters[0]': {PP: 1, MB: 0, PASS: BI} splits B[PP=1,MB=0] into BI and BW, but "
            "directive 1 orders it",
        ),
        (
            [split(2), order(f(1, 0), bi(1, 0)), order(f(1, 0), b(1, 0))],
            "directive 2 (order): field 'filters[1]': {PP: 1, MB: 0, PASS: B} matches nothing: directive 1 "
            "has split B into BI and BW, such as BI[PP=1,MB=0]. Name BI and BW instead",
        ),
        (
            [split(2), order(f(1, 0), bi(1, 0)), order(f(1, 0), {"PP": 1, "MB": 0, "PASS": ["B"]})],
            "directive 2 (order): field 'filters[1]': {PP: 1, MB: 0, PASS: ['B']} matches nothing: "
            "directive 1 has split",
        ),
        (
            [split(2), order(bi(1, 0), b(1, 0))],
            "directive 1 (order): field 'filters[1]': {PP: 1, MB: 0, PASS: B} matches nothing: directive 1 "
            "has split B into BI",
        ),
        (
            [split(2), order(f(0, 0), bi(0, 0), bw(0, 0)), order(f(0, 0), b(0, 0))],
            "directive 2 (order): field 'filters[1]': {PP: 0, MB: 0, PASS: B} matches nothing: directive 1 "
            "has split B into BI and BW, such as BW[PP=0,MB=0]",
        ),
        (
            [{"op": "place", "filter": {"PP": 1, "PASS": "BI"}, "devices": [0]}],
            "directive 0 (place): field 'filter': {PP: 1, PASS: BI} matches nothing: B[PP=1] is not split. "
            "Name B instead, or leave PASS out of the filter",
        ),
        (
            [split(2), order(bw(1, 0), bi(1, 0))],
            "directive 1 (order): field 'filters': this order closes a cycle: BI[PP=1,MB=0]@? -> (data) "
            "BW[PP=1,MB=0]@? -> (order, directive 1) BI[PP=1,MB=0]@?. Remove or reverse",
        ),
        (
            [
                split(2),
                order(bi(1, 0), bw(1, 0)),
                Fixed(),
                {"op": "split", "filter": {}, "dim_name": "UB", "num_microbatches": 2},
            ],
            "directive 3 (split): field 'filter': BI[PP=1,MB=0] is already ordered by directive 1",
        ),
        (
            [split(2), order(bi(3, 0), bw(1, 0))],
            "directive 1 (order): field 'filters[0]': {PP: 3, MB: 0, PASS: BI} matches nothing. Choose from "
            "the step's tags: MB in {0, 1}; PASS in {B, BI, BW, F}; PP in {0, 1}",
        ),
    ],
)
def test_refused(program: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build("mlp", *program)


def test_the_orders_that_contradict_are_fine_alone() -> None:
    """The control of the first and fourth case above."""
    for single in (order(f(1, 0), b(1, 0)), order(f(1, 1), bi(1, 0)), order(f(1, 0), bi(1, 0))):
        check(build("mlp", split(2), single))


def test_a_smaller_batch_lacks_the_halves_of_its_missing_microbatches() -> None:
    program = [*place(0, 1), split(3), *zero_bubble(2, 3)]
    for size in (1, 2, 3, 4):
        dag = build("mlp", *program, size=size)
        complete(dag)
        check(dag, final=True)
        assert len([c for c in dag.of_type(Chunk) if c.kind == "BI"]) == min(size, 3)


def test_halves_of_replicas() -> None:
    """Split after and before the replicas divide the batch."""
    one = case(POOL[0], 8)
    groups = [[0, 2], [1, 3]]
    places = [Place(filter={"PP": i}, devices=groups[i]) for i in (0, 1)]
    halves = Order(filters=[f(1, 0), bi(1, 0), f(1, 1), bi(1, 1), bw(1, 0)])
    parts = Split(filter={}, dim_name="MB", num_microbatches=2)
    replicas = Replicate(filter={}, devices=groups)
    for program in ([*places, parts, replicas, halves], [*places, parts, halves, replicas]):
        dag = check_program(one, program)
        assert sum(c.kind == "BW" for c in dag.of_type(Chunk)) == 2 and dag.replicas == 2


def test_what_a_directive_lets_wait_for_the_whole_waits_for_both_halves() -> None:
    """The second forward of stage 0 was to come after the backward of stage 1, on the same device."""
    one = case(POOL[0], 8)
    program = [
        Place(filter={}, devices=[0]),
        Split(filter={}, dim_name="MB", num_microbatches=2),
        Checkpoint(filter={"PP": 0}),
        Order(filters=[bi(1, 0), bw(1, 0)]),
    ]
    dag = check_program(one, program)
    (again,) = [c for c in dag.of_type(Chunk) if "RECOMPUTED" in c.tags and c.tags["MB"] == 0]
    assert {chunk(dag, f"{kind}[PP=1,MB=0]").id for kind in ("BI", "BW")} <= set(
        dag.graph.predecessors(again.id)
    )


def test_halves_of_a_second_forward() -> None:
    """Both halves read the one second forward."""
    program = [Place(filter={}, devices=[0]), Split(filter={}, dim_name="MB", num_microbatches=2),
               Order(filters=[bi(1, 0), bw(1, 0)]), Checkpoint(filter={"PP": 1})]  # fmt: skip
    dag = check_program(case(POOL[0], 8), program)
    second = [c for c in dag.of_type(Chunk) if "RECOMPUTED" in c.tags and c.tags["MB"] == 0]
    assert len(second) == 1 and {user.label for user in dag.users(second[0])} == {
        "BI[PP=1,MB=0]",
        "BW[PP=1,MB=0]",
    }
