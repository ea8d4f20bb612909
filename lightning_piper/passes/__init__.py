"""Everything that makes the DAG that plans are made of, as one list of passes: what is verified is what runs.

passes_of(program)                             # capture, one for each directive, complete, eliminate communication
dag = run_pipeline(step, program, after=hook)  # runs them; the hook sees the DAG after each one
apply_program(dag, program)                    # the directives alone, on a DAG that is there
"""

from lightning_piper.passes.base import After, Done, Pass, run_passes
from lightning_piper.passes.completion import complete
from lightning_piper.passes.elimination import eliminate
from lightning_piper.passes.pipeline import apply_program, passes_of, prepared, run_pipeline

__all__ = ["After", "Done", "Pass", "apply_program", "complete", "eliminate", "passes_of", "prepared", "run_passes", "run_pipeline"]
