"""A user's own operation, correct and with a fault in each of its functions. It sums over replicas in two
levels, such as first within machines and then between machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from lightning_piper import ir, ops
from lightning_piper.directives import Directive, parse
from lightning_piper.errors import DirectiveError, ExecutionError, PiperError, VerificationError
from lightning_piper.ir import Node, Replicated, TrainingDAG
from lightning_piper.ir.nodes import IssuePriority
from lightning_piper.ops import base
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.ops.reference import sum_in_order
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.runtime import Executor, LocalTransport, joined, run_local
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret
from tests.models import captured
from tests.runtime.steps import CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSum(Node):
    """A node that sums a bucket over lines of its group. The last of several such nodes gives the sum of all
    members.
    """

    turn = IssuePriority.ON_DEMAND
    communicates = sums = True
    lines: tuple[tuple[int, ...], ...]

    def members(self, replica: int) -> tuple[int, ...]:
        return tuple(
            self.devices[group_rank] for line in self.lines if replica in line for group_rank in line
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSumInstruction(ops.Collective):
    op: ClassVar[str] = "line_sum"
    sums: ClassVar[bool] = True


def check(facts: ops.Facts, node: LineSum) -> Iterable[str]:
    facts.forward(node)
    if str(facts.dag.value(node.inputs[0]).placement) != "P(sum)":
        yield f"{facts.at(node)} sums what is summed already"


def reference(run: ops.Reference, node: LineSum) -> list[list[list[torch.Tensor]]]:
    lines = {group_rank: line for line in node.lines for group_rank in line}
    return [
        [sum_in_order([run.values[node.inputs[0], r] for r in lines[replica]])] for replica in run.group_ranks
    ]


def lower(plan: ops.Planning, node: LineSum) -> None:
    plan.start(node, LineSumInstruction, (plan.read(node.inputs[0], node),), bucket=node.outputs[0].bucket)


class Exchange(ops.Exchange):
    def __init__(self, instruction: LineSumInstruction, on: ops.Binding) -> None:
        self._slot, self._slots, self._count = instruction.reads[0].slot, on.slots, len(instruction.members)

    def bring(self) -> Any:
        (flat,), self._slots[self._slot] = self._slots[self._slot], None
        return flat

    def parts(self, state: Any) -> Any:
        return [state] * self._count

    def join(self, state: Any, received: Any) -> Any:
        return tuple(sum_in_order([[x] for x in received]))


def bind(instruction: LineSumInstruction, on: ops.Binding) -> Any:
    return on.endpoint.collective(instruction, Exchange(instruction, on), on.slots)


OPERATION = ops.Operation(LineSum, check, reference, lower, bind={LineSumInstruction: bind})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLevels(Directive):
    """A directive that sums over the rows and then over the columns of two by two devices."""

    op: ClassVar[str] = "two_levels"
    contract: ClassVar[Any] = "reassociated"

    def apply(self, dag: TrainingDAG) -> None:
        for total in [
            total for total in dag.of_type(ops.AllReduce) if dag.value(total.inputs[0]).bucket is not None
        ]:
            fields = {field.name: getattr(total, field.name) for field in dataclasses.fields(Node)} | {
                "id": -1,
                "origin": None,
            }
            value = dag.value(total.inputs[0])
            rows = dag.add(LineSum(**{**fields, "outputs": (value,)}, lines=((0, 1), (2, 3))))
            made = dataclasses.replace(value, placement=Replicated())
            columns = dag.add(
                LineSum(**{**fields, "inputs": ((rows.id, 0),), "outputs": (made,)}, lines=((0, 2), (1, 3)))
            )
            for reader in dag.users(total):
                dag.substitute(reader, (total.id, 0), (columns.id, 0))
            dag.remove([total])


ALL = [0, 1, 2, 3]
PROGRAM = [{"op": "place", "filter": {}, "devices": ALL}, {"op": "replicate", "filter": {}, "devices": ALL}]


@pytest.fixture(autouse=True)
def registered() -> Any:
    with mock.patch.dict(base.OPERATIONS), mock.patch.dict(base.BINDERS), mock.patch.dict(base.INSTRUCTIONS):
        base.register_operation(OPERATION)
        yield


def executors() -> tuple[list[Any], list[Executor]]:
    """Return a step of the model `exact` in float64, whose sums are exact, and its executors."""
    model = captured("exact")
    dag = run_pipeline(model.step, [*parse(PROGRAM), TwoLevels()], after=StaticCheck())
    interpret(dag, model.tensors, model.leaves)
    plans = compile_plans(dag)
    check_plans(plans)
    transport = LocalTransport(plans)
    found = [
        Executor(plan, model.step, model.tensors, model.tensors, transport, CPU)
        for _, plan in sorted(plans.items())
    ]
    return [plans[device] for device in sorted(plans)], found


def test_a_sum_of_sums_waits_for_the_last_batch() -> None:
    ordered, devices = executors()
    batches = [[torch.randint(-3, 4, (4, 4)).double()] for _ in range(3)]
    single = [joined(ordered, run_local(devices, leaves, seed=0)) for leaves in batches]
    parts = [joined(ordered, run_local(devices, leaves, 0, last=i == 2)) for i, leaves in enumerate(batches)]
    assert parts[0] == parts[1] == {} != single[0]
    for name in single[0]:
        assert torch.equal(parts[2][name], sum(grads[name] for grads in single))
    again = joined(ordered, run_local(devices, batches[1], seed=0))
    assert all(torch.equal(again[name], x) for name, x in single[1].items()), "nothing is left over"


def bug(*given: Any) -> Any:
    raise KeyError("bug")


NAME = f"{__name__}.LineSum"


@pytest.mark.parametrize(
    "part, function, error, says",
    [
        (
            "check",
            lambda facts, node: None,
            VerificationError,
            f"the static rule of {NAME} gives None. Let it yield sentences",
        ),
        (
            "check",
            lambda facts, node: "wrong",
            VerificationError,
            f"the static rule of {NAME} gives 'wrong'. Let it",
        ),
        (
            "check",
            lambda facts, node: [3],
            VerificationError,
            f"the static rule of {NAME} gives 3. Let it yield sentences",
        ),
        (
            "interpret",
            lambda run, node: None,
            VerificationError,
            f"the reference semantics of {NAME} give no list of tensors for",
        ),
        (
            "interpret",
            lambda *on: reference(*on)[:1],
            VerificationError,
            "group rank 1, output 0. Return a list of tensors for each group rank (there are 4)",
        ),
        (
            "interpret",
            lambda *on: reference(*on)[0],
            VerificationError,
            "give no list of tensors for group rank 0",
        ),
        (
            "lower",
            lambda plan, node: plan.start(node, LineSumInstruction, (plan.read(node.inputs[0], node),)),
            VerificationError,
            "linesum is lowered to line_sum, which sums a bucket. In your operation, pass bucket= to plan.start",
        ),
        (
            "bind",
            lambda instruction, on: None,
            ExecutionError,
            "linesum, made by directive 2, placed by directive 1 has nothing",
        ),
        (
            "bind",
            lambda instruction, on: 3,
            ExecutionError,
            "linesum, made by directive 2, placed by directive 1 returned 3",
        ),
    ],
)
def test_what_a_function_gives_is_looked_at(
    part: str, function: Callable[..., Any], error: type[PiperError], says: str
) -> None:
    given: Any = {LineSumInstruction: function} if part == "bind" else function
    faulty = dataclasses.replace(OPERATION, **{part: given})
    base.OPERATIONS[LineSum] = faulty
    base.BINDERS.update(faulty.bind)
    with pytest.raises(error) as caught:
        executors()
    assert says in str(caught.value)
    if "PIPER-D019" in str(caught.value):
        assert f"({__file__}:{function.__code__.co_firstlineno}) [" in str(caught.value)


@pytest.mark.parametrize(
    "change, returned",
    [
        (lambda x: x[1:], "1 part"),
        (lambda x: [*x, *x], "4 parts"),
        (lambda x: None, "None, which is not a list"),
    ],
)
def test_an_exchange_has_a_part_for_each_member(change: Callable[[Any], Any], returned: str) -> None:
    parts = Exchange.parts
    with (
        mock.patch.object(Exchange, "parts", lambda self, state: change(parts(self, state))),
        pytest.raises(ExecutionError) as caught,
    ):
        run_local(executors()[1], [torch.ones(4, 4).double()], seed=0)
    says = f"parts() of {__name__}.Exchange returns {returned}, for 2 members. Return a list with one part for each member"
    assert (
        says in str(caught.value) and "linesum" in str(caught.value) and f"({__file__}:" in str(caught.value)
    )


@pytest.mark.parametrize(
    "part, says",
    [
        ("check", f"raised by the static rule of {NAME}, for %"),
        ("interpret", f"raised by the reference semantics of {NAME}, for %"),
        ("lower", f"raised by the lowering of {NAME}, for %"),
        ("bind", "linesum, made by directive 2, placed by directive 1 was bound on device 0"),
    ],
)
def test_what_a_function_raises_says_whose_it_is(part: str, says: str) -> None:
    faulty = dataclasses.replace(OPERATION, **{part: {LineSumInstruction: bug} if part == "bind" else bug})
    base.OPERATIONS[LineSum] = faulty
    base.BINDERS.update(faulty.bind)
    with pytest.raises(KeyError, match="bug") as caught:
        executors()
    assert any(says in note for note in caught.value.__notes__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between(Directive):
    """A directive that inserts a node between the first chunk and the chunk's readers.

    Attributes:
        placed: Whether the directive gives the node the devices of the chunk.
    """

    op: ClassVar[str] = "between"
    contract: ClassVar[Any] = "bitwise"

    placed: bool = True

    def apply(self, dag: TrainingDAG) -> None:
        chunk = next(chunk for chunk in dag.of_type(ir.Chunk) if dag.users(chunk))
        value, readers = dag.value((chunk.id, 0)), dag.readers((chunk.id, 0))
        made = dag.add(
            LineSum(
                inputs=((chunk.id, 0),),
                outputs=(value,),
                devices=chunk.devices if self.placed else (),
                lines=((0,),),
            )
        )
        for reader in readers:
            dag.substitute(reader, (chunk.id, 0), (made.id, 0))


def placing(devices: Sequence[int]) -> list[Directive]:
    return list(parse([{"op": "place", "filter": {"PP": n}, "devices": [d]} for n, d in enumerate(devices)]))


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (1, 0)])
def test_a_place_moves_a_node_of_an_earlier_directive_with_the_chunk_that_it_reads(
    devices: list[int],
) -> None:
    step = captured("exact").step
    before, after = (
        run_pipeline(step, program)
        for program in ([Between(), *placing(devices)], [*placing(devices), Between()])
    )
    (node,), (other,) = before.of_type(LineSum), after.of_type(LineSum)
    assert node.devices == other.devices == before.nodes[node.inputs[0][0]].devices == (devices[0],)
    assert [type(user) for user in before.users(node)] == [ir.Chunk if devices[0] == devices[1] else Send], (
        "its value travels to the reader's device"
    )
    assert run_pipeline(step, [Between()]).of_type(LineSum)


def test_without_a_place_every_node_runs_on_device_0() -> None:
    (node,) = run_pipeline(captured("exact").step, [Between(placed=False)]).of_type(LineSum)
    assert node.devices == (0,)


def test_a_node_without_devices_after_every_place_is_an_error() -> None:
    with pytest.raises(
        DirectiveError, match=r"linesum %.* made by directive 2, has no device. Let the directive give"
    ):
        run_pipeline(captured("exact").step, [*placing((0, 0)), Between(placed=False)])
