"""The plans of replicas differ only in the names of devices. A check of one column in place of all refuses
the same plans as a check of all columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch

import lightning_piper as piper
from lightning_piper import Place
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops.base import OPERATIONS
from lightning_piper.ops.communication.reduce import ReduceScatter
from lightning_piper.plan import Plan, Plans, check_plans, compile_plans
from lightning_piper.plan.columns import Columns, columns_of
from lightning_piper.plan.instructions import Instruction
from tests.axes import EXPERTS, everywhere, sparse
from tests.models import captured
from tests.plan.programs import dag_of, one_f_one_b, pipeline, split

# The fields of an instruction that tell which replica, or which part, is meant.
OWN = ("replica", "counts", "shard", "index")


def stages(*groups: list[int], **replicate: Any) -> list[dict[str, Any]]:
    places = [{"op": "place", "filter": {"PP": i}, "devices": list(group)} for i, group in enumerate(groups)]
    return [
        *places,
        {"op": "replicate", "filter": {}, "devices": [list(group) for group in groups], **replicate},
    ]


def zero3() -> TrainingDAG:
    """Two stages on two replicas each, with sharded parameters, under 1F1B."""
    program = stages([0, 1], [2, 3], shard_params=True)
    return dag_of(captured("mlp").step, [*program, *split(3), *one_f_one_b(2, 3)], 12)


def axes() -> TrainingDAG:
    """Two replicas of two devices, which divide the experts between them."""
    x = torch.randint(0, 8, (4, 8))
    program = [Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "ep"]), EXPERTS, everywhere(4)]
    return piper.compile(sparse(), (x, x), program).dag


WORLDS: dict[str, Callable[[], TrainingDAG]] = {"zero3": zero3, "axes": axes}


def named(plan: Plan, column: tuple[int, ...], plans: Plans) -> list[dict[str, Any]]:
    """The fields of a plan's instructions. Devices of the column are given by their numbers in it, and
    members by the devices whose plans stand for theirs.
    """

    def told(instruction: Instruction) -> dict[str, Any]:
        found = {"op": instruction.op} | {
            f.name: getattr(instruction, f.name) for f in dataclasses.fields(instruction)
        }
        if "channel" in found:
            found["channel"] = tuple(map(column.index, found["channel"]))
        if "members" in found:
            found["members"] = tuple(map(plans.image, found["members"]))
        return {name: value for name, value in found.items() if name not in OWN}

    return [told(instruction) for instruction in plan.instructions]


@pytest.mark.parametrize("world", WORLDS)
def test_columns_are_images_of_each_other_and_need_no_other_column(world: str) -> None:
    dag = WORLDS[world]()
    found, plans = columns_of(dag), compile_plans(dag)
    assert found.alike and len(found.columns) == len(dag.mesh.group_ranks) > 1
    first = found.columns[0]
    for column in found.columns:
        for device, like in zip(column, first, strict=True):
            assert plans.image(device) == like
            assert named(plans[device], column, plans) == named(plans[like], first, plans)
    with mock.patch("lightning_piper.plan.compilation.columns_of", lambda dag: columns_of(dag).together()):
        together = compile_plans(dag)
    assert dict(plans) == dict(together) == dict(together.representatives)


def accepts(plans: Mapping[int, Plan], **image: Any) -> bool:
    try:
        check_plans(plans, **image)
    except VerificationError:
        return False
    return True


def drop(instructions: list[Instruction], i: int) -> None:
    del instructions[i]


def exchange(instructions: list[Instruction], i: int) -> None:
    instructions[i - 1], instructions[i] = instructions[i], instructions[i - 1]


@pytest.mark.parametrize("edit", [drop, exchange])
@pytest.mark.parametrize("world", WORLDS)
def test_one_column_is_refused_when_all_are(
    world: str, edit: Callable[[list[Instruction], int], None]
) -> None:
    """An instruction after the other is dropped, or exchanged with the one before it, on all devices that are
    alike.
    """
    dag = WORLDS[world]()
    plans, of = dict(made := compile_plans(dag)), columns_of(dag)
    seen = {accepts(plans)}
    assert accepts(made.representatives, image=made.image)
    for device in made.representatives:
        devices = [column[of.index[device][1]] for column in of.columns]
        for i in range(len(plans[device].instructions)):
            broken = dict(plans)
            for like in devices:
                edit(instructions := list(plans[like].instructions), i)
                broken[like] = dataclasses.replace(plans[like], instructions=tuple(instructions))
            verdict = accepts(broken)
            seen.add(verdict)
            assert verdict == accepts({d: broken[d] for d in made.representatives}, image=made.image), plans[
                device
            ].instructions[i]
    assert seen == {True, False}


def test_stages_that_share_some_devices_are_not_alike() -> None:
    """Device 0 runs both stages of replica 0; replica 1 has a device for each."""
    dag = dag_of(captured("mlp").step, stages([0, 1], [0, 2]), 12)
    found = columns_of(dag)
    assert found.columns == ((0,), (1, 2)) and not found.alike
    plans = compile_plans(dag, 1)
    assert set(plans.representatives) == {0, 1, 2} and plans.image(2) == 2


def test_operations_that_may_differ_from_place_to_place_are_checked_at_each() -> None:
    other = dataclasses.replace(OPERATIONS[ReduceScatter], alike=False)
    with mock.patch.dict(OPERATIONS, {ReduceScatter: other}):
        assert len(compile_plans(zero3()).representatives) == 4


def test_plans_between_which_messages_go_are_made_together() -> None:
    """Where an operation of somebody else sends to another place."""
    dag = pipeline("mlp", 2, 2)
    apart = Columns(((0,), (1,)), True, columns_of(dag).group_rank_of)
    with mock.patch("lightning_piper.plan.compilation.columns_of", lambda dag: apart):
        plans = compile_plans(dag)
    assert dict(plans) == dict(compile_plans(dag)) and len(plans.representatives) == 2


def test_only_the_plans_that_are_asked_for_are_made() -> None:
    """A process of replica 1 makes those of its column."""
    made: list[set[int]] = []
    whole = Plans._make

    def counted(self: Plans, column: tuple[int, ...]) -> None:
        made.append(set(column))
        whole(self, column)

    with mock.patch.object(Plans, "_make", counted):
        plans = compile_plans(zero3(), 1)
        assert plans[1].group_rank == 1 and len(plans) == 4 and made == [{1, 3}]
        assert plans.group_rank_of(2) == 0 and plans[0].device == 0 and made == [{1, 3}, {0, 2}]
    assert set(plans.representatives) == {1, 3} and plans.image(0) == 1
