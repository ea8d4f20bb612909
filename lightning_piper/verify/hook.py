"""The static check as a hook of the pipeline."""

from __future__ import annotations

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.passes import Done
from lightning_piper.verify.static import check


def check_pass(dag: TrainingDAG, done: Done) -> None:
    """Check the DAG after a pass, unless it is judged together with the next one.

    Raises:
        VerificationError: as `check` does.
    """
    if done.by.apart:
        check(dag, final=done.by.finished)
