"""The passes of a step and a program."""

from __future__ import annotations

from typing import TypeVar

from lightning_piper.directives.program import Program, replicas_of
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Step
from lightning_piper.ops.build import empty_dag, fill
from lightning_piper.passes.base import After, Pass, run_passes
from lightning_piper.passes.completion import complete
from lightning_piper.passes.elimination import eliminate
from lightning_piper.passes.forward import forward_passes

S = TypeVar("S", bound=Step)


def passes_of(
    program: Program, forward_only: bool = False, training: TrainingDAG | None = None, divided: bool = False
) -> list[Pass]:
    """What makes the DAG that plans are made of, out of an empty one.

    Args:
        forward_only: the step has no backward pass.
        training: the training step's finished DAG then, if there is one.
        divided: tensors of the step are divided along axes (`Step.divisions`).

    Raises:
        DirectiveError: two directives contradict each other; names an index.
    """
    replicas_of(program)
    return [
        # What is cut where members change what they hold adds biases by themselves.
        Pass("capture", "reassociated" if divided else "bitwise", fill),
        *(forward_passes(program, training) if forward_only else _directives(program)),
        # It moves nothing that has a place, and what it leaves is the input of the last pass alone.
        Pass("complete", "bitwise", complete, apart=False, finished=True),
        Pass("eliminate communication", "bitwise", eliminate, finished=True),
    ]


def run_pipeline(
    step: Step,
    program: Program,
    size: int | None = None,
    training: TrainingDAG | None = None,
    after: After | None = None,
) -> TrainingDAG:
    """The DAG that plans are made of, for `size` samples (default: as captured).

    Args:
        training: as in `passes_of`.
        after: called after each pass.

    Raises:
        DirectiveError: a directive does not fit, or contradicts another one; names its index.
        VerificationError: `after` raises it.
    """
    dag = empty_dag(prepared(step, program), size)
    dag.program.ops = tuple(directive.op for directive in program)
    return run_passes(dag, passes_of(program, dag.forward_only, training, bool(dag.step.divisions)), after)


def prepared(step: S, program: Program) -> S:
    """The step as the directives of a program need it captured.

    Raises:
        DirectiveError: one does not fit; names its index.
    """
    for index, directive in enumerate(program):
        try:
            step = directive.prepare(step, program)  # type: ignore[assignment]
        except DirectiveError as error:
            raise DirectiveError(f"directive {index} {error}") from None
    return step


def apply_program(dag: TrainingDAG, program: Program) -> TrainingDAG:
    """Apply the directives alone to the DAG of a training step, in place, and return it.

    Raises:
        DirectiveError: a directive does not fit, or contradicts another one; names its index.
    """
    replicas_of(program)
    dag.program.ops = tuple(directive.op for directive in program)
    return run_passes(dag, _directives(program))


def _directives(program: Program) -> list[Pass]:
    return [Pass(directive.op, directive.contract, directive.apply, index) for index, directive in enumerate(program)]
