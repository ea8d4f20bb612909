"""Early updates in graphs and plans: after their whole gradient, beside the backward passes of earlier layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.errors import SimulationError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops import Accumulate, EarlyUpdate, Update
from lightning_piper.plan import check_plans
from lightning_piper.plan.instructions import (
    Add,
    EarlyUpdateInstruction,
    Instruction,
    ReduceScatterInstruction,
    Run,
    WaitEvent,
    WaitWork,
)
from lightning_piper.plan.no_sync_plan import no_sync_instructions
from lightning_piper.simulate import simulate
from lightning_piper.verify.static_check import check
from tests.plan.programs import edited
from tests.strategy.test_muon import Words, batches

LAYERS = 4


def compiled(zero: int, microbatches: int = 2, overlap: bool = True, **options: Any) -> Any:
    own = {"zero": zero, "shard_by": "parameter", "overlap_update": overlap, **options}
    program = [
        piper.Place([0, 1, 2, 3] if options else [0, 1]),
        piper.Split(microbatches),
        piper.Replicate(filter={"LAYER": "*"}, **own),
        piper.Replicate(filter={"LAYER": "-"}, zero=zero),
    ]
    (batch,) = batches(1)
    return piper.compile(Words((16,) * LAYERS, lambda: True), batch, program)


def position(instructions: list[Instruction], kind: type[Instruction], label: str) -> int:
    (found,) = [i for i, x in enumerate(instructions) if isinstance(x, kind) and x.label.startswith(label)]
    return found


@pytest.mark.parametrize("options", [{}, {"shard_size": 2}], ids=["one group", "groups"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_updates_of_later_layers_run_between_backward_passes_of_earlier_layers(
    zero: int, options: dict[str, Any]
) -> None:
    found = compiled(zero, 1, **options)
    check_plans(found.plans)
    for plan in found.plans.values():
        shown = [
            f"{x.op} {found.dag.nodes[x.node].tags.get('LAYER', '-')}"
            for x in plan.instructions
            if isinstance(x, EarlyUpdateInstruction | ReduceScatterInstruction)
            or (isinstance(x, Run) and x.label.startswith("B"))
        ]
        # The device waits for a sum after it has started two more, and then updates with it.
        assert [x for x in shown if not x.endswith("-")] == [
            "run 3",
            "reduce_scatter 3",
            "run 2",
            "reduce_scatter 2",
            "run 1",
            "reduce_scatter 1",
            "early_update 3",
            "run 0",
            "reduce_scatter 0",
            "early_update 2",
            "early_update 1",
            "early_update 0",
        ]
        assert {x.stream for x in plan.instructions if isinstance(x, EarlyUpdateInstruction)} == {"update"}


def test_only_the_last_batch_of_an_accumulation_updates_early() -> None:
    for zero in (1, 2, 3):
        plan = compiled(zero).plans[0]
        before = [x for _, x in no_sync_instructions(plan)]
        assert not any(isinstance(x, EarlyUpdateInstruction) for x in before)
        assert any(isinstance(x, EarlyUpdateInstruction) for x in plan.instructions)
        assert any(isinstance(x, ReduceScatterInstruction) for x in before) == (zero > 1)


def test_no_update_is_early_without_the_field() -> None:
    assert not any(compiled(1, overlap=False).dag.of_type(EarlyUpdate))


def read_first_microbatch(dag: TrainingDAG, early: EarlyUpdate) -> None:
    """Update with the sum over replicas of the first microbatch's gradient."""
    total = dag.nodes[early.inputs[0][0]]
    assert isinstance(total, Accumulate) and len(total.inputs) == 2
    dag.rewire(early, inputs=total.inputs[:1])


def read_own_term(dag: TrainingDAG, early: EarlyUpdate) -> None:
    """Update with the gradient of this replica's samples alone."""
    dag.rewire(early, inputs=dag.nodes[early.inputs[0][0]].inputs)


def drop_update(dag: TrainingDAG, early: EarlyUpdate) -> None:
    dag.remove([x for x in dag.of_type(Update) if x.inputs == early.inputs])


def lose_order(dag: TrainingDAG, early: EarlyUpdate) -> None:
    for update in [x for x in dag.of_type(Update) if x.inputs == early.inputs]:
        dag.graph.remove_edge(early.id, update.id)


GRAPH_FAULTS: dict[str, tuple[int, Callable[[TrainingDAG, EarlyUpdate], None], str]] = {
    "before the last microbatch": (
        2,
        read_first_microbatch,
        "the update begins before the gradient is complete",
    ),
    "before the sum over replicas": (
        1,
        read_own_term,
        r"the update needs whole gradients, but reads P\(sum\)",
    ),
    "without an update": (1, drop_update, "no update outputs this value to the optimizer after this node"),
    "after the update": (1, lose_order, "no update outputs this value to the optimizer after this node"),
}


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
def test_a_fault_of_the_graph_is_found(fault: str) -> None:
    zero, edit, message = GRAPH_FAULTS[fault]
    dag = compiled(zero).dag
    check(dag, final=True)
    edit(dag, next(dag.of_type(EarlyUpdate)))
    with pytest.raises(VerificationError, match=message):
        check(dag, final=True)


def before_the_last_term(instructions: list[Instruction]) -> None:
    """Run an early update before the last microbatch's gradient is added."""
    i = next(i for i, x in enumerate(instructions) if isinstance(x, EarlyUpdateInstruction))
    slot = instructions[i].reads[0].slot
    moved = [instructions.pop(i)]
    if isinstance(instructions[i - 1], WaitEvent):
        moved.insert(0, instructions.pop(i - 1))
    add = [i for i, x in enumerate(instructions) if isinstance(x, Add) and slot in x.writes][-1]
    instructions[add:add] = moved


def before_the_wait(instructions: list[Instruction]) -> None:
    """Run an early update before the sum over replicas has arrived."""
    i = next(i for i, x in enumerate(instructions) if isinstance(x, EarlyUpdateInstruction))
    slot = instructions[i].reads[0].slot
    moved = instructions.pop(i)
    wait = next(i for i, x in enumerate(instructions) if isinstance(x, WaitWork) and slot in x.writes)
    instructions.insert(wait, moved)


def without_event(instructions: list[Instruction]) -> None:
    """Do not let the stream of the update wait for the gradient."""
    i = next(i for i, x in enumerate(instructions) if isinstance(x, EarlyUpdateInstruction))
    assert isinstance(instructions.pop(i - 1), WaitEvent)


def in_each_batch(instructions: list[Instruction]) -> None:
    """Let a node that only the last batch runs read the gradient last, so that earlier batches keep it."""
    i = next(i for i, x in enumerate(instructions) if isinstance(x, EarlyUpdateInstruction))
    read = instructions[i].reads[0]
    deliver = next(k for k, x in enumerate(instructions) if k > i and read.slot in [r.slot for r in x.reads])
    instructions[i], last = (
        dataclasses.replace(instructions[i], reads=(dataclasses.replace(read, last=True),)),
        instructions.pop(deliver),
    )
    instructions.insert(i, dataclasses.replace(last, reads=(dataclasses.replace(last.reads[0], last=False),)))


# Name -> ZeRO level, microbatches, edit, message.
PLAN_FAULTS: dict[str, tuple[int, int, Callable[[list[Instruction]], None], str]] = {
    "before the last microbatch": (
        3,
        4,
        before_the_last_term,
        r"it adds to the gradient in slot s\d+ after early_update",
    ),
    "before the wait": (1, 2, before_the_wait, r"early_update .* slot s\d+ is read before it is written"),
    "without an event": (
        1,
        2,
        without_event,
        r"early_update .* was written on stream compute, and no event orders",
    ),
    "last read": (
        3,
        2,
        in_each_batch,
        "for a batch that is not the last batch of an accumulation: .* not empty",
    ),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_of_the_plan_is_found(fault: str) -> None:
    zero, microbatches, edit, message = PLAN_FAULTS[fault]
    plans = dict(compiled(zero, microbatches).plans)
    check_plans(plans)
    for device, plan in plans.items():
        plans[device] = edited(plan, edit)
    with pytest.raises(VerificationError, match=message):
        check_plans(plans)


@pytest.mark.parametrize("duration, exposed", [(2, 4), (3, 8)])
def test_the_simulator_hides_updates_beside_the_backward_pass(duration: int, exposed: int) -> None:
    """On an accelerator, updates that take as long as a backward pass add only the last two updates to the step."""
    found = compiled(1, 1)
    alone, both = (
        simulate(found.dag, found.plans, {"F": 1, "B": 2, "early_update": each}).step_time
        for each in (0, duration)
    )
    assert both == alone + exposed < alone + LAYERS * duration


def test_an_update_takes_time_only_with_an_entry() -> None:
    plain, overlapped = compiled(1, overlap=False), compiled(1)
    assert len({simulate(each.dag, each.plans).step_time for each in (plain, overlapped)}) == 1
    with pytest.raises(SimulationError, match="operation 'early_updates' is unknown"):
        simulate(overlapped.dag, overlapped.plans, {"F": 1, "B": 2, "early_updates": 1})


def test_the_copies_of_early_updates_count_as_memory() -> None:
    """Until the end of the step, an owner has the new values and the gradients of its parameters twice."""
    found, plain = (compiled(2, 1, overlap) for overlap in (True, False))
    copies = {
        device: sum(x.nbytes for x in plan.instructions if isinstance(x, EarlyUpdateInstruction))
        for device, plan in found.plans.items()
    }
    assert sum(copies.values()) == 2 * 4 * LAYERS * (8 * 16 + 16 + 16 * 8 + 8 + 8 + 8)
    for device, nbytes in copies.items():
        with_copies, without = (
            simulate(each.dag, each.plans).devices[device].memory[-1][1] for each in (found, plain)
        )
        assert with_copies == without + nbytes
