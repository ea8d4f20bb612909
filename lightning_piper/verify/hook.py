"""The static check of a program: of the DAG after each pass, or only of the finished DAG."""

from __future__ import annotations

from lightning_piper.common.units import Stopwatch
from lightning_piper.directives import Program
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Step
from lightning_piper.passes import Done, run_pipeline
from lightning_piper.verify.static_check import check


def check_each(dag: TrainingDAG, done: Done) -> None:
    """Check the DAG after a pass, except after a pass that is judged together with the next pass.

    Raises:
        VerificationError: See `check`.
    """
    if done.by.apart:
        check(dag, final=done.by.finished)


def run_checked(
    step: Step,
    program: Program,
    watch: Stopwatch,
    size: int | None = None,
    training: TrainingDAG | None = None,
) -> TrainingDAG:
    """Return the DAG of `run_pipeline`, and check only this DAG.

    If the check or a directive fails, apply the program again, with a check after each pass. So the error is the
    earliest one, and names the directive that caused it.

    Args:
        watch: Measures the time of the check.

    Raises:
        DirectiveError, VerificationError: See `run_pipeline`.
    """

    def after(dag: TrainingDAG, done: Done) -> None:
        if done.by.apart and done.by.finished:
            with watch:
                check(dag, final=True)

    try:
        return run_pipeline(step, program, size, training, after)
    except Exception as error:
        failed = error
    run_pipeline(step, program, size, training, check_each)
    raise failed
