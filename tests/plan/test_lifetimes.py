"""When values are removed from their slots."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.plan import compile_plans
from lightning_piper.plan.instructions import CutInstruction, Run
from lightning_piper.plan.lifetimes import mark_last_reads
from tests.models import captured
from tests.plan.programs import dag_of, place, plans_of, split


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "conv", "residual", "losses", "experts", "reentered"])
def test_every_slot_is_emptied_by_its_last_reader_and_by_no_other(name: str) -> None:
    for plan in plans_of(name, 2, 3, ordered=False).values():
        last = {read.slot: i for i, x in enumerate(plan.instructions) for read in x.reads}
        for i, instruction in enumerate(plan.instructions):
            for slot in {read.slot for read in instruction.reads}:
                marks = [read.last for read in instruction.reads if read.slot == slot]
                assert any(marks) == (last[slot] == i)
                assert sum(marks) <= 1 and not any(marks[:-1])
        written = {slot for x in plan.instructions for slot in x.writes if slot is not None}
        assert written == set(last)


def test_what_nobody_reads_is_not_stored() -> None:
    # The first microbatch's buffers are read by the second's forward. With one microbatch the module takes
    # them.
    dag = dag_of(captured("losses").step, [])
    for chunk in [i for i in compile_plans(dag)[0].instructions if isinstance(i, Run)]:
        readers = {source for node in dag.nodes.values() for source in node.reads}
        assert [slot is not None for slot in chunk.writes] == [
            (chunk.node, i) in readers for i in range(len(chunk.writes))
        ]


def test_a_whole_value_is_kept_until_its_last_part_is_cut() -> None:
    step = captured("mlp").step
    plan = compile_plans(dag_of(step, place(step, 2) + split(2, PP=1)))[1]
    cuts = [i for i in plan.instructions if isinstance(i, CutInstruction)]
    assert [cut.reads[0].last for cut in cuts] == [False, True]
    # Parts are cut when they are needed, not before.
    for cut in cuts:
        following = plan.instructions[plan.instructions.index(cut) + 1]
        assert isinstance(following, Run) and cut.into in [read.slot for read in following.reads]


def test_what_one_half_of_a_backward_alone_needs_is_freed_by_it() -> None:
    """F saves three bundles: the second stage's is read by BI, by BW, and by both. BW comes at the very
    end.
    """
    step = captured("gpt").step
    halves = [
        {
            "op": "order",
            "filters": [{"PP": 1, "MB": mb, "PASS": kind} for kind in ("BI", "BW") for mb in (0, 1)],
        }
    ]
    dag = dag_of(step, place(step, 3) + split(2) + halves)
    plan = compile_plans(dag)[1]
    slots = {
        (x.node, i): slot for x in plan.instructions if isinstance(x, Run) for i, slot in enumerate(x.writes)
    }
    emptied = {read.slot: x for x in plan.instructions for read in x.reads if read.last}
    freed = {}
    for ref, slot in slots.items():
        if slot is not None and dag.value(ref).kind == "saved":
            made, by = dag.nodes[ref[0]], emptied[slot]
            freed[made.label, dag.value(ref).label] = (by.label, by.node)
    for mb in (0, 1):
        inputs, weights = (
            next((c.label, c.id) for c in dag.of_type(Chunk) if c.label == f"{kind}[PP=1,MB={mb}]")
            for kind in ("BI", "BW")
        )
        assert freed[f"F[PP=1,MB={mb}]", "saved:BI"] == inputs
        for made, name in (
            (f"F[PP=1,MB={mb}]", "saved:BW"),
            (f"F[PP=1,MB={mb}]", "saved:BI,BW"),
            (inputs[0], "saved:BW"),
        ):
            assert freed[made, name] == weights
    forward = next(c for c in dag.of_type(Chunk) if c.label == "F[PP=1,MB=0]")
    assert all(value.nbytes > 0 for value in forward.outputs if value.label in ("saved:BI", "saved:BW"))


def test_a_value_that_nobody_reads_is_refused() -> None:
    plan = plans_of("mlp", 1, 1)[0]
    unread = [i for i in plan.instructions if i.op != "report"]
    with pytest.raises(VerificationError, match="device 0: no instruction reads the result of merge"):
        mark_last_reads(0, [dataclasses.replace(i) for i in unread])
