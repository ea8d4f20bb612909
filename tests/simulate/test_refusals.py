"""What a simulation refuses, and tables of durations."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_piper.errors import SimulationError, VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.p2p import Recv
from lightning_piper.plan.instructions import (
    AllReduceInstruction,
    Instruction,
    Irecv,
    Record,
    Run,
    WaitEvent,
    WaitWork,
)
from lightning_piper.simulate import Link, Network, read_durations, simulate
from lightning_piper.simulate.durations import WorkDurations
from tests.plan.programs import edited, split
from tests.simulate.programs import compiled, pipeline

REPLICATED = [
    {"op": "place", "filter": {}, "devices": [0, 1]},
    {"op": "replicate", "filter": {}, "devices": [0, 1]},
]


def durations_of(table: Any) -> dict[str, Any]:
    """The duration of each chunk of two stages and two microbatches, according to a table."""
    program = pipeline("gpipe", 2, 2)
    work = WorkDurations(program.dag, table)
    runs = [i for plan in program.plans.values() for i in plan.instructions if isinstance(i, Run)]
    return {i.label: work.of(i) for i in runs}


def test_the_most_specific_entry_counts() -> None:
    table = {"F": 1, "F[PP=1]": 2, "F[MB=1,PP=1]": 3, "B": Fraction(1, 2), "BW": 9}
    assert durations_of(table) == {
        "F[PP=0,MB=0]": 1, "F[PP=0,MB=1]": 1, "F[PP=1,MB=0]": 2, "F[PP=1,MB=1]": 3,
        **{f"B[PP={s},MB={m}]": Fraction(1, 2) for s in (0, 1) for m in (0, 1)},
    }  # fmt: skip


def test_a_node_counts_before_its_tags() -> None:
    program = pipeline("gpipe", 2, 2)
    chunk = next(c for c in program.dag.of_type(Chunk) if c.label == "F[PP=1,MB=1]")
    assert durations_of({"F": 1, "B": 2, "F[PP=1,MB=1]": 3, f"%{chunk.id}": 4})["F[PP=1,MB=1]"] == 4


def test_a_function_gets_the_chunk() -> None:
    def twice_for_the_last(chunk: Chunk) -> int:
        return 1 + (chunk.tags["PP"] == 1)

    assert set(durations_of(twice_for_the_last).values()) == {1, 2}


BAD = {
    "missing": ({"F": 1}, r"%\d+ B\[PP=1,MB=0\] has no duration. Give one for 'B' \["),
    "ambiguous": ({"B": 2, "F[PP=0]": 1, "F[MB=0]": 2}, r"'F\[PP=0\]' and 'F\[MB=0\]' are equally specific "
                                                        r"for %\d+ F\[PP=0,"),
    "twice": ({"F[PP=0,MB=0]": 1, "F[MB=0,PP=0]": 1}, r"'F\[PP=0,MB=0\]' and 'F\[MB=0,PP=0\]' are the same "
                                                      r"entry"),
    "unused": ({"F": 1, "B": 2, "F[PP=7]": 1}, r"no chunk has the pass and the tags of 'F\[PP=7\]'"),
    "no tag": ({"F[PP]": 1}, r"'F\[PP\]': 'PP' is not a tag with an index. Give for example"),
    "unreadable": ({"F PP=1": 1}, r"'F PP=1' cannot be understood. Give a pass"),
    "unknown node": ({"F": 1, "B": 2, "%999": 1}, r"'%999' is not a node of this program"),
    "unknown pass": ({"F": 1, "B": 2, "FW": 5}, r"'FW': pass 'FW' is unknown. Give one of F, B, BI, BW. Did you mean"),
    "unknown pass with tags": ({"F": 1, "B": 2, "W[PP=0]": 5}, r"'W\[PP=0\]': pass 'W' is unknown. Give one of F, B"),
    "recomputed": ({"F": 1, "B": 2, "R": 1}, r"pass 'R' is unknown"),
    "unknown operation": ({"F": 1, "B": 2, "ad": 5}, r"operation 'ad' is unknown. Give one of add, .*merge.* Did you mean 'add'"),
    "communication": ({"F": 1, "B": 2, "send": 5}, r"'send' has no duration, because .* Give the duration of a node"),
    "negative": ({"F": -1, "B": 2}, r"'F' is -1. Give 0, or a number"),
    "not finite": ({"F": float("nan"), "B": 2}, r"'F' is nan. Give 0, or a number from 1e-15 to 1e15"),
    "no number": ({"F": "1", "B": 2}, r"'F' is '1'. Give 0, or a number from 1e-15 to 1e15"),
    "a truth value": ({"F": True, "B": 2}, r"'F' is True. Give 0, or a number from 1e-15 to 1e15"),
    "by function": (lambda chunk: None, r"the duration of %\d+ F\[PP=0,MB=0\] is None. Give 0, or a number from 1e-15 to 1e15"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_durations_that_cannot_be_used(name: str) -> None:
    table, message = BAD[name]
    with pytest.raises(SimulationError, match=message):
        durations_of(table)


def test_passes_and_operations_that_this_program_lacks_are_no_error() -> None:
    more = {"BI": 1, "BW": 1, "add": 1, "keep": 1, "pack": 1}
    assert durations_of({"F": 1, "B": 2, **more}) == durations_of({"F": 1, "B": 2})


def test_a_transfer_is_named_by_its_send() -> None:
    program = pipeline("gpipe", 2, 2)
    recv = next(program.dag.of_type(Recv))
    with pytest.raises(
        SimulationError, match=f"'%{recv.id}' is a recv. Name its send, '%{recv.inputs[0][0]}'"
    ):
        simulate(program.dag, program.plans, {"F": 1, "B": 2, f"%{recv.id}": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latency": -1}, "latency is -1. Give 0, or a number"),
        ({"bandwidth": 0}, "bandwidth is 0. Give a number from 1e-15"),
    ],
)
def test_links_that_cannot_be(fields: Any, message: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(message)):
        Link(**fields)


def test_durations_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text('{"F": 1.5, "B": 3}')
    assert read_durations(path) == {"F": 1.5, "B": 3}
    path.write_text("[1]")
    with pytest.raises(SimulationError, match=r"holds a list. Write an object such as"):
        read_durations(path)
    path.write_text("{")
    with pytest.raises(SimulationError, match="cannot be read as JSON"):
        read_durations(path)
    with pytest.raises(SimulationError, match="does not exist"):
        read_durations(tmp_path / "none.json")


def wait_first(instructions: list[Instruction]) -> None:
    """Let a device wait for its first message before it sends anything."""
    irecv = next(i for i in instructions if isinstance(i, Irecv))
    wait = next(i for i in instructions if isinstance(i, WaitWork) and i.node == irecv.node)
    for instruction in (wait, irecv):
        instructions.remove(instruction)
        instructions.insert(0, instruction)


def test_a_deadlock_names_who_waits_for_what() -> None:
    program = pipeline("gpipe", 2, 2)
    plans = {**program.plans, 0: edited(program.plans[0], wait_first)}
    with pytest.raises(
        VerificationError, match=r"^the plans deadlock: device 0 waits in wait %\d+ recv.*; device 1 waits in"
    ):
        simulate(program.dag, plans)


def without(kind: type[Instruction]) -> Any:
    return lambda instructions: instructions.remove(next(i for i in instructions if isinstance(i, kind)))


def test_plans_that_wait_for_nothing() -> None:
    program = pipeline("gpipe", 2, 2)
    for kind, message in (
        (Irecv, "no earlier instruction started the work for which it waits"),
        (Record, "before this event is recorded"),
    ):
        plans = {**program.plans, 1: edited(program.plans[1], without(kind))}
        with pytest.raises(VerificationError, match=rf"^plan of device 1: .*{message}"):
            simulate(program.dag, plans)
    assert any(isinstance(i, WaitEvent) for i in program.plans[1].instructions)


def with_reductions(kind: type[AllReduceInstruction]) -> Any:
    """The simulation of a replicated step whose all-reduces are replaced by another collective."""
    program = compiled("mlp", [*REPLICATED, *split(2)])

    def exchange(instructions: list[Instruction]) -> None:
        for i, instruction in enumerate(instructions):
            if isinstance(instruction, AllReduceInstruction):
                instructions[i] = kind(
                    **{f.name: getattr(instruction, f.name) for f in dataclasses.fields(instruction)}
                )

    plans = {device: edited(plan, exchange) for device, plan in program.plans.items()}
    return simulate(program.dag, plans, network=Network(Link(latency=1)))


class Once(AllReduceInstruction):
    """Another collective, which goes round the ring once. It is started on a stream, runs over a group, and
    is completed by the wait of its node.
    """

    op: ClassVar[str] = "once"
    rings: ClassVar[int] = 1


def test_a_collective_says_what_it_costs() -> None:
    """An all-reduce goes round the ring twice."""
    assert with_reductions(AllReduceInstruction).step_time == 14
    found = with_reductions(Once)
    assert found.step_time == 13 and {s.kind for s in found.timeline if s.stream == "reduce"} == {"once"}
