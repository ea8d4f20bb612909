"""The arguments of a step during its capture, and the error for a step that returns None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

SKIPPED = (
    "training_step returned None. A captured step needs a loss for every batch. Return the loss, and leave batches "
    "without a loss out of the data [PIPER-C006]"
)


def arguments(step: Callable[..., Any], batch: Any, batch_idx: Any, dataloader_idx: int | None) -> list[Any]:
    """Return the positional arguments that Lightning passes to a step, in a new list: the batch, then
    `batch_idx` if the step takes it, then `dataloader_idx` if there is one.

    Args:
        step: a bound method or a function, such as `module.training_step`.
        dataloader_idx: the index of the loader, or None if there is only one loader. With None, a step with
            three required arguments still gets the index 0.
    """
    given = [batch]
    spec = inspect.getfullargspec(inspect.unwrap(step))
    named = spec.args[1:] if inspect.ismethod(step) else spec.args
    if "batch_idx" in named or spec.varargs is not None or len(named) >= 2:
        given.append(batch_idx)
    if dataloader_idx is None:
        demanded = [
            p
            for p in inspect.signature(step).parameters.values()
            if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        ]
        dataloader_idx = 0 if len(demanded) == 3 else None
    return given if dataloader_idx is None else [*given, dataloader_idx]
