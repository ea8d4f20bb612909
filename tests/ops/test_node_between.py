"""A directive of a user that puts a new kind of node between two chunks, in one file: alone, and after and before
other directives. The package gives the node its devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import strategies as st

from lightning_piper import ops, register
from lightning_piper.directives import Directive, Place, Replicate, base, parse
from lightning_piper.ir import Chunk, Kind, Node, TrainingDAG
from lightning_piper.ops import base as operations
from lightning_piper.ops.communication.p2p import Recv
from lightning_piper.passes import run_pipeline
from lightning_piper.testing import directive_suite
from lightning_piper.verify.hook import StaticCheck
from tests.models import captured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clone(Node):
    """A node that outputs a copy of its input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloneInstruction(ops.Instruction):
    op: ClassVar[str] = "clone"


def check(facts: ops.Facts, node: Clone) -> Iterable[str]:
    facts.forward(node)
    return ()


def reference(run: ops.Reference, node: Clone) -> Any:
    return [[[x.clone() for x in run.values[node.inputs[0], replica]]] for replica in run.group_ranks]


def lower(plan: ops.Planning, node: Clone) -> None:
    read = plan.read(node.inputs[0], node)
    slot = plan.new_slot((node.id, 0), "chunk", node.stream)
    plan.emit(CloneInstruction(**ops.about(node), reads=(read,), writes=(slot,)))


def bind(instruction: CloneInstruction, on: ops.Binding) -> Any:
    (read,), (slot,), slots = instruction.reads, instruction.writes, on.slots

    def clone() -> None:
        slots[slot] = tuple(x.clone() for x in slots[read.slot])
        if read.last:
            slots[read.slot] = None

    return clone


OPERATION = ops.Operation(Clone, check, reference, lower, bind={CloneInstruction: bind})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloning(Directive):
    """Let the reader of the value number `index`, of all that go from one chunk to another, read a copy of it.

    Attributes:
        index: Counts modulo the number of values.
    """

    op: ClassVar[str] = "clone_value"
    contract: ClassVar[Any] = "bitwise"

    index: int

    def check_fields(self) -> None:
        if type(self.index) is not int or self.index < 0:
            self.refuse("index", str(self.index), "give an integer >= 0")

    def apply(self, dag: TrainingDAG) -> None:
        edges = [
            (reader, ref)
            for reader in dag.of_type(Chunk)
            for ref in dict.fromkeys(reader.inputs)
            if dag.value(ref).kind in (Kind.ACTIVATION, Kind.COTANGENT)
            and isinstance(dag.nodes[ref[0]], Chunk | Recv)
        ]
        if edges:
            reader, ref = edges[self.index % len(edges)]
            made = dag.add(Clone(inputs=(ref,), outputs=(dag.value(ref),), devices=dag.nodes[ref[0]].devices))
            dag.substitute(reader, ref, (made.id, 0))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with (
        mock.patch.dict(operations.OPERATIONS),
        mock.patch.dict(operations.BINDERS),
        mock.patch.dict(operations.INSTRUCTIONS),
        mock.patch.dict(base._registry),
    ):
        operations.register_operation(OPERATION)
        register(Cloning)
        yield


TestCloning = directive_suite(Cloning, lambda case, dag: st.builds(Cloning, index=st.integers(0, 20)))


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_it_may_come_before_places_and_replicas(devices: list[int]) -> None:
    program: list[Directive] = [Cloning(index=0), *(Place(devices, filter={"PP": n}) for n in (0, 1))]
    if len(devices) > 1:
        program.append(Replicate(devices))
    dag = run_pipeline(captured("exact").step, parse(program), after=StaticCheck())
    (node,) = dag.of_type(Clone)
    assert node.devices == tuple(devices)
