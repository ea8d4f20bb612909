"""Tools for authors of directives: models, programs and test suites to verify a rewrite::

    TestMine = directive_suite(Mine, lambda case, dag: st.builds(Mine, filter=st.just({"PP": 0})))

Needs the extra `test` (pytest, hypothesis).
"""

from lightning_piper.testing.equivalence import assert_same, run_interpreter, run_plans, single_device
from lightning_piper.testing.models import BLOCKS, EXACT_BLOCKS, Case, Model, Spec, case, make_batch
from lightning_piper.testing.programs import FAULTS, Broken, broken_programs, cases, programs, sizes, specs
from lightning_piper.testing.suite import POOL, check_program, directive_suite

__all__ = [
    "BLOCKS",
    "EXACT_BLOCKS",
    "FAULTS",
    "POOL",
    "Broken",
    "Case",
    "Model",
    "Spec",
    "assert_same",
    "broken_programs",
    "case",
    "cases",
    "check_program",
    "directive_suite",
    "make_batch",
    "programs",
    "run_interpreter",
    "run_plans",
    "single_device",
    "sizes",
    "specs",
]
