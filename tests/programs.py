"""Programs for models that many tests share. A step is captured once, and cut once for each program that
needs a cut.
"""

from __future__ import annotations

from typing import Any

from lightning_piper.capture import CapturedStep
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import Directive, parse
from lightning_piper.passes import prepared
from lightning_piper.verify import Report, verify_step

CUT: dict[tuple[CapturedStep, str], CapturedStep] = {}


def compiled(step: CapturedStep, program: Any) -> Compiled:
    """Compile a program like `piper.compile` with the module. The result may be changed, but not the step."""
    directives = tuple(parse(program))
    return compile_step(_cut(step, directives), directives)


def report(step: CapturedStep, batch: Any, program: Any) -> Report:
    """Verify a program like `piper.verify` with the module."""
    directives = tuple(parse(program))
    return verify_step(_cut(step, directives), step.module, batch, directives)


def _cut(step: CapturedStep, program: tuple[Directive, ...]) -> CapturedStep:
    key = step, repr(program)
    if key not in CUT:
        CUT[key] = prepared(step, program)
    return CUT[key]
