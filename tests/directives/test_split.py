"""`split`: real partitions of the batch, of the whole step and of parts of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_piper.directives import parse
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.ops.metrics import Metrics
from lightning_piper.ops.order import Barrier
from lightning_piper.ops.samples import Concat, Cut
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.dags import Fixed, b, build, chunk, f, order, place, run, shape, split
from tests.models import captured
from tests.reference import differences, distance, plain


def slices(dag: Any, region: int = 0) -> list[str]:
    return [str(c.slice) for c in sorted(dag.of_type(Chunk), key=lambda c: c.slice) if c.key == (region, "F")]


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [
        (4, 1, ["0:4"]),
        (4, 2, ["0:2", "2:4"]),
        (5, 2, ["0:3", "3:5"]),
        (8, 3, ["0:3", "3:6", "6:8"]),
        (5, 5, ["0:1", "1:2", "2:3", "3:4", "4:5"]),
    ],
)
def test_pieces_differ_by_one_sample_at_most(size: int, count: int, expected: list[str]) -> None:
    name = "mlp"
    dag = build(name, split(count), size=size)
    assert slices(dag) == slices(dag, 1) == expected
    assert [c.tags["MB"] for c in dag.of_type(Chunk) if c.key == (0, "F")] == list(range(count))
    check(dag)


def test_five_samples_in_two_microbatches() -> None:
    """Uneven pieces weigh n/N, so that their sum is the whole batch's."""
    c = captured("mlp", size=5)
    found = interpret(apply_program(build_dag(c.step), parse([split(2)])), c.tensors, c.leaves)
    assert differences(found, plain(c, [3, 2])) == []
    # In float32; measured: 2e-7 to 1.2e-6, by processor.
    assert distance(found, plain(c, [5])) < 1e-5 < 1e-2 < distance(found, plain(c, [3, 2], [0.5, 0.5]))


def test_in_exact_arithmetic_any_split_keeps_every_bit() -> None:
    whole = run("exact", build("exact"))
    for program in (
        [split(2)],
        [split(4)],
        [split(2), split(2, "UB")],
        [split(2), split(2, "UB", MB=1)],
        [split(4, PP=0)],
    ):
        dag = build("exact", *program)
        check(dag)
        assert differences(run("exact", dag), whole) == []
    wrong = build("exact", split(2))
    metrics = next(wrong.of_type(Metrics))
    wrong.change(metrics, slices=(metrics.slices[0], metrics.slices[0]))
    total = next(wrong.of_type(Accumulate))
    wrong.rewire(total, inputs=(total.inputs[0], total.inputs[0]))
    assert differences(run("exact", wrong), whole) != [], "the control: another sum has other bits"


def test_nested_splits() -> None:
    dag = build("mlp", split(2), split(2, "UB"), *place(0, 1))
    complete(dag)
    check(dag)
    assert slices(dag) == ["0:1", "1:2", "2:3", "3:4"]
    assert chunk(dag, "F[PP=1,MB=1,UB=0]").slice.start == 2
    assert differences(run("mlp", dag), run("mlp", build("mlp", split(4)))) == []


def test_a_microbatch_may_be_split_further() -> None:
    dag = build("mlp", split(2), split(2, "UB", MB=0))
    check(dag)
    assert slices(dag) == ["0:1", "1:2", "2:4"]
    assert differences(run("mlp", dag), plain(captured("mlp"), [1, 1, 2])) == []


def test_gradients_are_added_from_the_first_slice_to_the_last() -> None:
    dag = build("mlp", split(3), split(1, "UB", MB=0))
    for total in dag.of_type(Accumulate):
        starts = [dag.nodes[ref[0]].slice.start for ref in total.inputs]  # type: ignore[attr-defined]
        assert starts == sorted(starts) and len(starts) == 3


# Parts of the model


def test_a_part_is_cut_and_joined_at_its_border() -> None:
    dag = build("gpt", split(2, PP=1))
    check(dag)
    cuts, joins = list(dag.of_type(Cut)), list(dag.of_type(Concat))
    assert [(c.start, c.stop, c.dim) for c in cuts] == [(0, 2, 0), (2, 4, 0)] * 2
    assert [j.outputs[0].kind for j in joins] == ["activation", "cotangent"]
    assert [len(c.inputs) for c in dag.of_type(Accumulate)] == [1, 2, 1]
    found, whole = run("gpt", dag), run("gpt", build("gpt"))
    assert distance(found, whole) < 1e-5 and "layers.0.up.weight" in differences(found, whole)


@pytest.mark.parametrize("name", ["gpt", "tied", "experts", "losses", "autocast", "used_twice", "constants"])
def test_every_single_stage_can_be_split_and_placed_in_any_order(name: str) -> None:
    whole = run(name, build(name))
    stages = 1 + max(region.tags["PP"] for region in captured(name).step.at(4).regions)
    for stage in range(stages):
        if (name, stage) == ("losses", 0):
            continue  # hands out a number of the batch, see below
        first, second = [*place(*range(stages))], [split(2, PP=stage)]
        one, two = build(name, *first, *second), build(name, *second, *first)
        for dag in (one, two):
            complete(dag)
            check(dag)
        assert differences(run(name, one), run(name, two)) == []
        assert distance(run(name, one), whole) < (2e-2 if name == "autocast" else 1e-5)


@pytest.mark.parametrize("name", ["gpt", "losses"])
def test_a_part_of_a_microbatch_can_be_split(name: str) -> None:
    """The pieces of the second microbatch are cut from it, not from the batch."""
    whole = run(name, build(name, split(2)))
    for program in ([split(2), split(2, "UB", PP=1)], [split(2), split(2, "UB", PP=1, MB=1)]):
        dag = build(name, *program)
        check(dag)
        assert [(cut.start, cut.stop) for cut in dag.of_type(Cut)][:2] == [(0, 1), (1, 2)]
        assert distance(run(name, dag), whole) < 1e-5


@pytest.mark.parametrize("first", [True, False], ids=["placed first", "placed last"])
@pytest.mark.parametrize(
    "program",
    [
        [split(4, PP=0), split(2, "UB", PP=1)],
        [split(2, PP=1), split(4, "UB", PP=0)],
        [split(2, PP=1), split(2, "UB", PP=1)],
        [split(2, PP=1), split(2, "UB", MB=0)],
        [split(2, PP=1), split(2, "UB")],
        [split(2, PP=0), split(2, "UB", PP=[1, 2]), split(2, "VB", PP=1)],
        [split(2, PP=2), split(4, "UB", PP=[0, 1])],
    ],
    ids=str,
)
def test_several_parts_are_split_each_in_its_way(program: list[Any], first: bool) -> None:
    """What one split has cut or joined is cut or joined again by the next."""
    where = place(0, 1, 2)
    dag = build("gpt", *(where + program if first else program + where))
    complete(dag)
    check(dag, final=True)
    assert distance(run("gpt", dag), run("gpt", build("gpt"))) < 1e-5
    check_plans(compile_plans(dag))
    alone = build("gpt", *program)
    complete(alone)
    check(alone, final=True)
    assert differences(run("gpt", alone), run("gpt", dag)) == []


def test_a_region_that_runs_twice_is_split_both_times() -> None:
    """The second forward is younger than the backward that reads it."""
    dag = build("mlp")
    forward, backward = chunk(dag, "F[PP=0]"), chunk(dag, "B[PP=0]")
    again = dag.duplicate(forward)
    for i in range(len(forward.outputs)):
        dag.substitute(backward, (forward.id, i), (again.id, i))
    apply_program(dag, parse([split(2)]))
    check(dag)
    assert slices(dag) == ["0:2", "0:2", "2:4", "2:4"]
    assert differences(run("mlp", dag), run("mlp", build("mlp", split(2)))) == []


def test_what_cannot_be_repeated_is_refused() -> None:
    dag = build("mlp")
    forward, reader = chunk(dag, "F[PP=0]"), chunk(dag, "F[PP=1]")
    between = dag.add(Barrier(inputs=((forward.id, 0),), outputs=forward.outputs[:1], origin=7))
    dag.substitute(reader, (forward.id, 0), (between.id, 0))
    found = re.escape(
        f"barrier %{between.id}, made by directive 7, reads F[PP=0], but cannot be repeated for "
        "microbatches. Move this directive"
    )
    with pytest.raises(DirectiveError, match=found):
        apply_program(dag, parse([split(2)]))


def test_a_value_that_is_the_same_for_all_samples_enters_whole() -> None:
    """The penalty is a number of the whole batch; the stage that adds it is split."""
    dag = build("losses", split(2, PP=1))
    check(dag)
    assert len(list(dag.of_type(Cut))) == 2
    reader = chunk(dag, "F[PP=1,MB=1]")
    assert [type(dag.nodes[ref[0]]).__name__ for ref in reader.inputs] == ["Cut", "Chunk"]
    assert distance(run("losses", dag), run("losses", build("losses"))) < 1e-6
    assert any(
        isinstance(node, Accumulate) and node.outputs[0].kind == "cotangent" for node in dag.nodes.values()
    )


def test_tokens_in_one_dimension_with_the_samples() -> None:
    """Which rows belong to which sample cannot be known, and shapes do not show a wrong guess: such a border
    is refused.
    """
    for name in ("flat", "positions_first"):
        with pytest.raises(
            DirectiveError,
            match=r"\(split\): field 'filter': .* does not show which rows belong to which sample",
        ):
            build(name, split(2, PP=1))
        check(build(name, split(2)))  # without a border inside


def test_transfers_follow_a_split() -> None:
    before, after = build("mlp", *place(0, 1)), build("mlp", *place(0, 1), split(4))
    assert (len(list(before.of_type(Send))), len(list(after.of_type(Send)))) == (2, 8)
    assert all(send.outputs[0].tensors[0].shape[0] == 1 for send in after.of_type(Send))


# Smaller batches


@pytest.mark.parametrize(
    ("size", "expected"), [(3, ["0:1", "1:2", "2:3"]), (1, ["0:1"]), (4, ["0:1", "1:2", "2:3", "3:4"])]
)
def test_a_smaller_batch_has_fewer_microbatches(size: int, expected: list[str]) -> None:
    groups = [f(0, mb) for mb in range(4)] + [b(0, mb) for mb in range(4)]
    dag = build(
        "mlp",
        *place(0, 1),
        split(4),
        order(*groups),
        order([f(1, 2), f(1, 3)], [b(1, 2), b(1, 3)]),
        size=size,
    )
    complete(dag)
    check(dag)
    assert slices(dag) == expected
    assert dag.program.absent.get("MB", set()) == set(range(len(expected), 4))
    expected_outcome = plain(captured("mlp"), [1] * size)
    if size == captured("mlp").case.size:
        assert differences(run("mlp", dag), expected_outcome) == []
    assert torch.equal(
        run("mlp", dag).metrics[LOSS], run("mlp", build("mlp", split(size), size=size)).metrics[LOSS]
    )


def test_a_smaller_batch_still_refuses_a_misspelled_microbatch() -> None:
    with pytest.raises(
        DirectiveError, match=r"directive 3 \(order\): field 'filters\[1\]': {PP: 0, MB: 4, PASS: F} matches"
    ):
        build("mlp", *place(0, 1), split(4), order(f(0, 0), f(0, 4)), size=2)
    build("mlp", *place(0, 1), split(4), order(f(0, 0), f(0, 3)), size=2)  # the control


def test_a_smaller_batch_under_nested_splits() -> None:
    dag = build(
        "mlp",
        split(2),
        split(2, "UB"),
        order(f(0, 0, UB=0), f(0, 0, UB=1), f(0, 1, UB=0), f(0, 1, UB=1)),
        size=3,
    )
    assert slices(dag) == ["0:1", "1:2", "2:3"] and dag.program.absent == {"UB": {1}}
    check(dag)


# Refused


@pytest.mark.parametrize(
    ("name", "program", "says"),
    [
        (
            "mlp",
            [split(5)],
            "directive 0 (split): field 'num_microbatches': 4 samples cannot be split into 5 microbatches. Give at "
            "most 4 microbatches",
        ),
        (
            "mlp",
            [split(2), split(3, "UB")],
            "(split): field 'num_microbatches': 2 samples cannot be split into 3 microbatches. Give at most 2 microbatches",
        ),
        (
            "mlp",
            [split(2), split(2)],
            "directive 1 (split): field 'dim_name': F[PP=0,MB=0] already has MB=0. Give a new tag",
        ),
        (
            "mlp",
            [split(2, PP=0), split(2)],
            "directive 1 (split): field 'dim_name': F[PP=0,MB=0] already has MB=0. Give a new tag",
        ),
        (
            "mlp",
            [split(2, "PP")],
            "directive 0 (split): field 'dim_name': F[PP=0] already has PP=0. Give a new tag",
        ),
        (
            "mlp",
            [split(2, TP=0)],
            "directive 0 (split): field 'filter': {TP: 0} matches nothing. Choose from the step's tags: PASS in {B, F}",
        ),
        (
            "mlp",
            [split(2, PASS="F")],
            "directive 0 (split): field 'filter': the filter selects F[PP=0] but not B[PP=0]. Select both, because the "
            "passes of a region are split together",
        ),
        (
            "mlp",
            [split(2, PASS="B", PP=1)],
            "directive 0 (split): field 'filter': the filter selects B[PP=1] but not F[PP=1]. Select both, because the "
            "passes of a region are split together",
        ),
        (
            "mlp",
            [order(f(0), b(0)), Fixed(), split(2)],
            "directive 2 (split): field 'filter': F[PP=0] is already ordered by directive 0. Move this "
            "directive before that order",
        ),
        (
            "losses",
            [split(2, PP=0)],
            "directive 0 (split): field 'filter': F[PP=0] is selected, F[PP=1] is not, and the value "
            "between them has no dimension of samples along which Piper could join the microbatches. Select all chunks",
        ),
    ],
)
def test_refused(name: str, program: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build(name, *program)


def test_a_refused_split_names_a_border_value_with_two_batch_dimensions() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"a value between .* has shape .* for 4 samples and .* does not show which rows belong to which sample",
    ):
        build("similar", split(2, PP=1))


def test_one_piece_is_a_tag_and_nothing_else() -> None:
    one = build("mlp", split(1))
    assert [c.label for c in one.of_type(Chunk)] == [
        "F[PP=0,MB=0]",
        "F[PP=1,MB=0]",
        "B[PP=1,MB=0]",
        "B[PP=0,MB=0]",
    ]
    assert differences(run("mlp", one), run("mlp", build("mlp"))) == []
    assert sum(shape(one).values()) == sum(shape(build("mlp")).values())
