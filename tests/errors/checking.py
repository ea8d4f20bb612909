"""Errors of the static check, of the check of plans and of the check by execution. They need a wrong rewrite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import lightning_piper as piper
from lightning_piper.compiler import compile_step
from lightning_piper.directives import parse
from lightning_piper.ir import Chunk, TrainingDAG
from lightning_piper.ops.communication.p2p import Recv
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.plan import Plan, check_plans
from lightning_piper.plan.instructions import Instruction, Irecv, Run, SendInstruction, WaitSend, WaitWork
from tests.errors.case import PLACES, SPLIT, Case, Cases, batch, captured_step, net

TITLE = "Checks of the graph and of the plans"
INTRO = """Programs of built-in directives do not raise these errors, although Piper checks them in the same way. If you write \
a directive with a wrong rewrite, Piper raises an error after it has applied the directive, and names its index. \
Plans that you change by hand raise such errors too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(piper.Directive):
    """A directive whose rewrite is wrong."""

    op: ClassVar[str] = "mine"
    contract: ClassVar[Any] = "bitwise"

    rewrite: Callable[[TrainingDAG], Any]

    def apply(self, dag: TrainingDAG) -> Any:
        return self.rewrite(dag)


def rewrite(what: str, change: Callable[[TrainingDAG], Any]) -> Case:
    program = [*PLACES, SPLIT, Mine(rewrite=change)]
    return Case(what, lambda: compile_step(captured_step(), tuple(parse(program))))


def chunk(dag: TrainingDAG, label: str) -> Chunk:
    return next(c for c in dag.of_type(Chunk) if c.label == label)


def lose_a_gradient(dag: TrainingDAG) -> None:
    total = next(dag.of_type(Accumulate))
    dag.rewire(total, inputs=total.inputs[:-1])


def count_a_gradient_twice(dag: TrainingDAG) -> None:
    total = next(dag.of_type(Accumulate))
    dag.rewire(total, inputs=(*total.inputs, total.inputs[0]))


def forget_an_update(dag: TrainingDAG) -> None:
    dag.remove([next(dag.of_type(Update))])


def exchange_microbatches(dag: TrainingDAG) -> None:
    first, second = chunk(dag, "B[PP=1,MB=0]"), chunk(dag, "B[PP=1,MB=1]")
    mine, other = first.inputs, second.inputs
    dag.rewire(first, inputs=other)
    dag.rewire(second, inputs=mine)


def move_without_a_message(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "F[PP=1,MB=0]"), devices=(0,))


def receive_from_nowhere(dag: TrainingDAG) -> None:
    receive = next(dag.of_type(Recv))
    dag.change(receive, peers=(7,))


def a_circle(dag: TrainingDAG) -> None:
    dag.order(chunk(dag, "B[PP=0,MB=0]"), chunk(dag, "F[PP=0,MB=0]"), dag.origin)


def half_a_gradient(dag: TrainingDAG) -> None:
    """Halve one gradient in the code of a chunk, which only an execution finds. One, because with two wrong
    gradients rounding would decide which one differs more.
    """
    code = dag.step.at(4).code
    run = code[0, "B"].run

    def wrong(args: Any) -> tuple[Any, ...]:
        first, *others = run(args)
        return first / 2, *others

    graph = code[0, "B"].graph
    code[0, "B"] = dataclasses.replace(code[0, "B"], made=lambda: (wrong, graph))


def plans(what: str, change: Callable[[list[Instruction]], None], device: int = 0) -> Case:
    def run() -> None:
        found = dict(compile_step(captured_step(), tuple(parse([*PLACES, SPLIT]))).plans)
        instructions = list(found[device].instructions)
        change(instructions)
        edited: Plan = dataclasses.replace(found[device], instructions=tuple(instructions))
        check_plans({**found, device: edited})

    return Case(what, run)


def at(instructions: list[Instruction], kind: type[Instruction], number: int = 0) -> int:
    return [i for i, x in enumerate(instructions) if isinstance(x, kind)][number]


def drop(kind: type[Instruction]) -> Callable[[list[Instruction]], None]:
    def change(instructions: list[Instruction]) -> None:
        del instructions[at(instructions, kind)]

    return change


def exchange(kind: type[Instruction]) -> Callable[[list[Instruction]], None]:
    def change(instructions: list[Instruction]) -> None:
        a, b = at(instructions, kind, 0), at(instructions, kind, 1)
        instructions[a], instructions[b] = instructions[b], instructions[a]

    return change


CASES: Cases = [
    rewrite("`apply` does not return a contract", lambda dag: dag.size),
    rewrite("a microbatch's gradient is lost", lose_a_gradient),
    rewrite("a microbatch's gradient counts twice", count_a_gradient_twice),
    rewrite("a gradient does not reach the optimizer", forget_an_update),
    rewrite("a chunk reads values of a different microbatch", exchange_microbatches),
    rewrite("data cross devices without a message", move_without_a_message),
    rewrite("a receive from a device that does not send", receive_from_nowhere),
    rewrite("nodes that wait for each other", a_circle),
    Case("a result that is wrong, in a graph that looks right: `piper.verify(...).require()`",
         lambda: piper.verify(net(), batch(), [*PLACES, SPLIT, Mine(rewrite=half_a_gradient)]).require()),
    plans("a plan without a wait", drop(WaitWork)),
    plans("a plan without a receive", drop(Irecv)),
    plans("a plan without a send", drop(SendInstruction)),
    plans("a plan that never gives a sent tensor back", drop(WaitSend)),
    plans("a plan sends in a different order than its peer receives", exchange(SendInstruction)),
    plans("a plan runs a pass before its input has arrived", exchange(Run), device=1),
]  # fmt: skip
