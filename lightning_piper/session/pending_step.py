"""`PendingStep`: a training step between the arrival of its batch and its run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_piper.compiler import Compiled
from lightning_piper.errors import CaptureError
from lightning_piper.session.process_runtime import Prepared


@dataclass(slots=True)
class PendingStep:
    """A training step that is about to run on the current batch. `Fit.step` makes one, sets `prepared`
    and `closing` before the run, and drops it afterwards.

    Attributes:
        number: Number of the batch over the whole training.
        last: Whether the batch is the last one of a gradient accumulation.
        first: Whether the step is the first step of an epoch.
        captured: The capture that is valid for the batch. None if the step is yet to be captured.
        prepared: The program to run. None if it is yet to be compiled.
        state: Checksum of the Python state that the step reads.
        changed: The error to raise if the step has changed since its capture. None if it has not.
        scale: The factor by which `backward` will multiply the loss.
        keeps: Whether gradients stay accumulated locally after this batch, without an all-reduce.
        closing: The factor on all gradients of an accumulation. None before its last batch, and without token
            weights.
    """

    number: int
    last: bool
    first: bool
    captured: Compiled | None
    prepared: Prepared | None
    state: int
    changed: CaptureError | None
    scale: float
    keeps: bool
    closing: float | None = None
