"""The passes of a step and a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from lightning_piper.directives.base import error_at
from lightning_piper.directives.program import Program, replicas_of
from lightning_piper.directives.rewrites.sharding import buckets_between_steps, keeps_shards_of
from lightning_piper.directives.sequence import applied_order
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.buckets import Bucket
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
    """Return the passes that make the DAG for plans, starting with an empty DAG.

    Args:
        forward_only: Whether the step lacks a backward pass.
        training: For a forward-only step, the training step's finished DAG, if there is one.
        divided: Whether tensors of the step are divided along axes (`Step.divisions`).

    Raises:
        DirectiveError: Two directives contradict each other. The message names the index of one of them.
    """
    replicas_of(program)
    return [
        # With divided tensors the captured graph adds biases separately from the products, which rounds
        # differently.
        Pass("capture", "reassociated" if divided else "bitwise", fill),
        *(forward_passes(program, training) if forward_only else _directives(program)),
        # No separate check: this pass does not change placed nodes, and only the last pass reads its result.
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
    """Return the DAG from which plans are compiled, with `size` samples (default: the captured size).

    Args:
        training: The training step's first finished DAG, if there is one. It determines where forward-only
            steps, and training steps in other layouts of the batch, find parameters.
        after: Called after each pass.

    Raises:
        DirectiveError: A directive does not fit or contradicts an earlier directive. The message names its
            index, or the degrees for which Piper wrote the program.
        VerificationError: `after` raised it.
    """
    step = prepared(step, program)

    def run(earlier: Mapping[str, Mapping[tuple[int, ...], Bucket]] | None) -> TrainingDAG:
        dag = empty_dag(step, size)
        _describe(dag, program)
        dag.earlier_buckets = earlier
        return run_passes(
            dag, passes_of(program, dag.forward_only, training, bool(dag.step.divisions)), after
        )

    # A training step in another layout of the batch first chooses its own buckets. If its devices would then
    # read parameters from buckets that differ from those in `training`, run again with the buckets of
    # `training`.
    dag = run(None)
    if training is None or dag.forward_only or keeps_shards_of(dag, training):
        return dag
    return run(buckets_between_steps(training))


def prepared(step: S, program: Program) -> S:
    """Return the step in the form that the directives of a program need.

    Raises:
        DirectiveError: A directive does not fit. The message names its index.
    """
    for index, directive in enumerate(program):
        try:
            step = directive.prepare(step, program)  # type: ignore[assignment]
        except DirectiveError as error:
            raise error_at(index, directive, error) from None
    return step


def apply_program(dag: TrainingDAG, program: Program) -> TrainingDAG:
    """Apply only the directives to the DAG of a training step, in place, and return the DAG.

    Raises:
        DirectiveError: A directive does not fit or contradicts an earlier directive. The message names its
            index, or the degrees for which Piper wrote the program.
    """
    _describe(dag, program)
    return run_passes(dag, _directives(program))


def _describe(dag: TrainingDAG, program: Program) -> None:
    """Record the program's ops, number of replicas and degrees in the DAG. Directives and
    messages use them.

    Raises:
        DirectiveError: Two directives contradict each other. The message names the index of one of them.
    """
    dag.program.ops = tuple(directive.op for directive in program)
    dag.program.replicas = max(replicas_of(program).values(), default=0) + 1
    dag.program.degrees = next((each.written_for for each in program), None)


def _directives(program: Program) -> list[Pass]:
    return [
        Pass(program[i].op, program[i].contract, program[i].apply, i, directive=program[i])
        for i in applied_order(program)
    ]
