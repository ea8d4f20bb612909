"""Shifts: each member of a group holds a part of a value, and afterwards holds the part of another member."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded, TensorSpec, is_shift
from lightning_piper.ops.communication.redistribute import (
    Redistribute,
    ShiftInstruction,
    _Redistribute,
    _Shift,
    changed_specs,
)
from lightning_piper.ops.instruction import Read
from lightning_piper.placements.placement_changes import parsed
from lightning_piper.simulate import Link, Network

WHOLE = torch.arange(48.0).reshape(2, 24)
PLACEMENTS: list[Placement] = [
    Sharded(1),
    Sharded(1, 3, 2),
    Sharded(0, turn=1),
    Sharded(1, 1, -3),
    Replicated(),
    Partial(),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_placement_is_what_it_is_written_as(placement):
    assert parsed(str(placement)) == placement


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("turn", [0, 1, 3, -1])
def test_a_member_holds_the_part_of_one_before_it(blocks, turn):
    placement = Sharded(1, blocks, turn)
    parts, own = placement.parts(WHOLE, 4), Sharded(1, blocks).parts(WHOLE, 4)
    assert all(torch.equal(parts[i], own[(i - turn) % 4]) for i in range(4))
    assert torch.equal(placement.joined(parts), WHOLE)
    assert turn == 0 or not torch.equal(Sharded(1, blocks).joined(parts), WHOLE)


def test_parts_of_runs_of_one_element_lie_without_holes():
    """Kernels read them as they lie, and so does who sends them."""
    assert all(part.is_contiguous() for part in Sharded(0, 3).parts(torch.arange(48.0).reshape(6, 8), 2))
    assert not torch.arange(48.0).reshape(3, 2, 8)[:, 0].is_contiguous()


def test_which_changes_are_shifts():
    assert is_shift(Sharded(2), Sharded(2, turn=1)) and is_shift(Sharded(2, 4, 1), Sharded(2, 4))
    others = [
        (Sharded(2), Sharded(1, turn=1)),
        (Sharded(2), Sharded(2, 4, 1)),
        (Sharded(2), Sharded(2)),
        (Replicated(), Sharded(2, turn=1)),
    ]
    assert not any(is_shift(*pair) for pair in others)


class Bound:
    """Stands for an executor with one slot, to which an exchange is bound."""

    def __init__(self, own: int, value: torch.Tensor) -> None:
        self.own, self.slots = own, [(value,)]


def exchanged(
    before: Sharded, after: Sharded, members: int, kind: type[_Redistribute]
) -> tuple[list[torch.Tensor], int]:
    """The parts that the members hold after an exchange, and the number of elements that were sent from one
    member to another.
    """
    spec = TensorSpec.of(before.parts(WHOLE, members)[0])
    devices = tuple(range(10, 10 + members))
    instruction = ShiftInstruction(
        node=0,
        label="shift",
        reads=(Read(0),),
        writes=(1,),
        before=before,
        after=after,
        members=devices,
        communicator="ring",
        tensors=(spec,),
    )
    ends = [
        kind(instruction, Bound(d, x)) for d, x in zip(devices, before.parts(WHOLE, members), strict=True)
    ]  # type: ignore[arg-type]
    states = [end.bring() for end in ends]
    sent = [list(end.parts(state)) for end, state in zip(ends, states, strict=True)]
    rooms = [end.room(state, parts) for end, state, parts in zip(ends, states, sent, strict=True)]
    assert all(rooms[i][j].shape == sent[j][i].shape for i in range(members) for j in range(members))
    made = [
        end.join(state, [parts[i] for parts in sent])[0]
        for i, (end, state) in enumerate(zip(ends, states, strict=True))
    ]
    return made, sum(part.numel() for i, parts in enumerate(sent) for j, part in enumerate(parts) if i != j)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 3), (1, 0), (3, 1)])
def test_each_member_sends_its_part_once(before, after):
    one, other = Sharded(1, turn=before), Sharded(1, turn=after)
    made, elements = exchanged(one, other, 4, _Shift)
    assert all(torch.equal(x, y) for x, y in zip(made, other.parts(WHOLE, 4), strict=True))
    assert elements == WHOLE.numel()
    wrong, _ = exchanged(one, dataclasses.replace(other, turn=after + 1), 4, _Shift)
    assert not any(torch.equal(x, y) for x, y in zip(wrong, other.parts(WHOLE, 4), strict=True))


def test_a_shift_takes_the_time_of_one_message():
    spec = TensorSpec.of(torch.empty(2, 6))
    turned = Sharded(1, turn=1)
    about = {"node": 0, "label": "shift", "members": (0, 1, 2, 3), "communicator": "ring", "tensors": (spec,)}
    instruction = ShiftInstruction(before=Sharded(1), after=turned, **about)
    network = Network(link=Link(latency=1, bandwidth=spec.nbytes))
    assert network.collective(instruction) == 2
    assert changed_specs([spec], Sharded(1), Sharded(1, turn=1), 4) == (spec,)
    assert Redistribute.communicates
