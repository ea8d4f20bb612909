"""Trace a step again until it reads no further Python number that must become an input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from lightning_piper.capture.joint.sizes import Specs
from lightning_piper.capture.joint.trace_text import difference, text_of
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.python_state.side_effects import ContainerGrowth
from lightning_piper.capture.python_state.state_reads import (
    RandomDraw,
    StateReads,
    refuse_drawing,
    without_drawing,
)
from lightning_piper.capture.tracing.step_trace import Fakes, TracedStep, fakes_of, trace


@dataclass(frozen=True)
class TraceArguments:
    """The arguments of a trace of a step.

    Attributes:
        size: number of samples.
        parts, fakes: see `trace`.
        degrees: see `ir.regions.Step`.
        known: the digest of an earlier trace; see `TracedStep`.
    """

    size: int
    parts: Mapping[str, int] = field(default_factory=dict)
    degrees: tuple[int, ...] = ()
    fakes: Fakes = fakes_of
    known: str | None = None


def settled_trace(
    new_step: Callable[[tuple[int, ...]], TracedStep],
    reads: StateReads,
    batch: Specs,
    device: torch.device,
    arguments: TraceArguments,
) -> tuple[TracedGraph, Specs, TracedStep]:
    """Trace a step. Repeat the trace while it finds another Python number that must become an input.

    Args:
        new_step: returns a new module for one trace, from the degrees.
        reads: records what the step reads.
        batch: the specs of the batch's tensors.

    Returns:
        The traced graph, the specs of its inputs (the batch's tensors, then Python numbers), and the step
        that was traced.

    Raises:
        CaptureError: the step cannot be captured, for example because it draws Python or NumPy random
            numbers.
        Exception: an error of the step itself.
    """
    inputs = reads.inputs
    while True:
        step, numbers = new_step(arguments.degrees), inputs.specs()
        step.known = arguments.known
        run = partial(trace, step, batch + numbers, device, arguments.parts, arguments.fakes)
        try:
            with without_drawing():
                traced = reads.with_first_write(
                    step.name, run, lambda a, b: difference(text_of(a), text_of(b)) is None
                )
        except ContainerGrowth:
            # The trace has found a list, dict or number that the step changes. The next trace has a
            # placeholder for it.
            continue
        except RandomDraw as error:
            raise refuse_drawing(step.name, error, run) from error
        except Exception:
            if inputs.plain or not (inputs.given or inputs.numbers):
                raise
            # The user's code does not accept the placeholder of a number: use plain numbers.
            inputs.plain = True
            continue
        if numbers == inputs.specs():
            return traced, batch + numbers, step
