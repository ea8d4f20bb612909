"""How a step is called while it is captured: its arguments, and what it must not draw."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_piper.errors import CaptureError


@contextlib.contextmanager
def drawing_nothing(step: str) -> Iterator[None]:
    """Refuse a step that draws from the global generators of Python or NumPy: the captured step would keep what was drawn."""
    python, array = random.getstate(), np.random.get_state()
    yield
    drawn = "random" if random.getstate() != python else "numpy.random" if _unlike(np.random.get_state(), array) else ""
    if drawn:
        random.setstate(python)
        np.random.set_state(array)
        raise CaptureError(
            f"{step} draws numbers from {drawn}, and a captured step would use the first ones for ever; draw them with torch "
            "(torch.rand, torch.distributions), as tensors, or put them into the batch"
        )


def _unlike(a: Any, b: Any) -> bool:
    return any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def arguments(step: Callable[..., Any], batch: Any, batch_idx: Any, dataloader_idx: int | None) -> list[Any]:
    """What Lightning calls a step with. `dataloader_idx` is None where there is one loader; a step that demands it gets 0."""
    given = [batch]
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        given.append(batch_idx)
    if dataloader_idx is None:
        demanded = [
            p for p in inspect.signature(step).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        ]
        dataloader_idx = 0 if len(demanded) == 3 else None
    return given if dataloader_idx is None else [*given, dataloader_idx]
