"""The passes that make the DAG which plans come from.

They are one list, so the verified DAG is the DAG that runs.

An example::

    passes_of(program)                             # capture, each directive, complete, eliminate
    dag = run_pipeline(step, program, after=hook)  # runs the passes; the hook sees the DAG after each one
    apply_program(dag, program)                    # the directives alone, on an existing DAG
"""

from lightning_piper.passes.base import After, Done, Pass, run_passes
from lightning_piper.passes.completion import complete
from lightning_piper.passes.elimination import eliminate
from lightning_piper.passes.pipeline import apply_program, passes_of, prepared, run_pipeline

__all__ = [
    "After",
    "Done",
    "Pass",
    "apply_program",
    "complete",
    "eliminate",
    "passes_of",
    "prepared",
    "run_passes",
    "run_pipeline",
]
