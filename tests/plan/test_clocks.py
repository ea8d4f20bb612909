"""Every event, every recorded use and the stream of every wait is necessary: the check refuses a plan that
lacks one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.plan.checks.clocks import problems_of
from lightning_piper.plan.instructions import (
    Add,
    AllGatherInstruction,
    Collective,
    Deliver,
    Instruction,
    Record,
    Run,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from tests.models import captured
from tests.plan.programs import dag_of, one_f_one_b, pipeline, split
from tests.sharded import finished, program, replicate, stages

GROUPS = [[0, 2], [1, 3]]
PROGRAMS = {
    "1F1B": lambda: pipeline("mlp", 2, 3),
    "replicas": lambda: sharded({}),
    "ZeRO-1": lambda: sharded({"shard_optimizer": True}),
    "ZeRO-3": lambda: sharded({"shard_params": True}),
}


def sharded(level: dict[str, bool]) -> TrainingDAG:
    step = captured("mlp", 8).step
    return dag_of(step, [*stages(step, GROUPS), *split(2), *one_f_one_b(2, 2), replicate(GROUPS, **level)])


def faults(instruction: Instruction) -> Iterator[tuple[str, Instruction | None]]:
    """The faults that can be made with an instruction's streams: for each, its name and the instruction that
    takes the place of the right one (None: no instruction).
    """
    if isinstance(instruction, Record | WaitEvent):
        yield "dropped", None
    if isinstance(instruction, WaitEvent):
        yield "on another stream", dataclasses.replace(instruction, stream="elsewhere")
        for slot in instruction.shared:
            yield (
                "not shared",
                dataclasses.replace(instruction, shared=tuple(s for s in instruction.shared if s != slot)),
            )
    if isinstance(instruction, WaitSend | WaitWork | Deliver | Add | Collective):
        yield "on another stream", dataclasses.replace(instruction, stream="elsewhere")
    if isinstance(instruction, Run) and (
        instruction.reads or any(slot is not None for slot in instruction.writes)
    ):
        yield "on a stream of its own", dataclasses.replace(instruction, stream="elsewhere")


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_there_for_nothing(name: str) -> None:
    plans = compile_plans(PROGRAMS[name]())
    check_plans(plans)
    tried, passed = 0, []
    for device, plan in plans.items():
        for i, instruction in enumerate(plan.instructions):
            for fault, instead in faults(instruction):
                changed = [
                    *plan.instructions[:i],
                    *([instead] if instead else []),
                    *plan.instructions[i + 1 :],
                ]
                tried += 1
                try:
                    check_plans({**plans, device: dataclasses.replace(plan, instructions=tuple(changed))})
                except VerificationError:
                    continue
                passed.append(f"device {device}: {instruction}: {fault}")
    assert tried > 60
    assert passed == []


def test_a_batch_that_is_not_the_last_is_checked_by_itself() -> None:
    """Gradients that are handed out before they are summed are there in the last batch alone."""
    plans = compile_plans(PROGRAMS["replicas"]())
    deliver = next(
        x
        for plan in plans.values()
        for x in plan.instructions
        if isinstance(x, Deliver) and x.node in plan.sync_only
    )
    wrong = {
        d: dataclasses.replace(plan, sync_only=plan.sync_only - {deliver.node}) for d, plan in plans.items()
    }
    with pytest.raises(
        VerificationError, match=r"not the last batch of an accumulation: .* is read before it is written"
    ) as caught:
        check_plans(wrong)
    assert str(caught.value).count("PIPER-") == 1


def test_a_kept_bucket_is_gathered_again_when_all_have_read_it() -> None:
    model = captured("mlp", 8)
    plans = compile_plans(finished(model, program(model.step, "DP2", {"shard_optimizer": True})))
    plan = plans[0]
    gather = next(x for x in plan.instructions if isinstance(x, AllGatherInstruction))
    assert gather.kept
    reader = next(
        i for i, x in enumerate(plan.instructions) if gather.into in [read.slot for read in x.reads]
    )
    slot = plan.slots
    again = (
        dataclasses.replace(gather, writes=(slot,)),
        WaitWork(node=gather.node, label="", stream=gather.stream, writes=(slot,)),
    )
    there = dataclasses.replace(
        plan, instructions=(*plan.instructions[: reader + 1], *again, *plan.instructions[reader + 1 :])
    )
    found = [problem for _, _, problem in problems_of(there)]
    assert found == [f"slot s{gather.into} is changed here, and stream compute may not have read it yet"]
