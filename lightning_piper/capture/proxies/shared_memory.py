"""Operations whose results share memory with their argument, but not in a trace.

    y = dropout(x, p=0.0); y.add_(1)    changes x, but a trace of torch copies x
    y, z = x.unsafe_chunk(2); y.add_(1)    changes x, but a trace of torch does not know this

A search over torch's sample inputs of all operations has found no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

# Operation -> operation whose trace shows the shared memory.
_SHOWN = {"unsafe_chunk": "chunk", "unsafe_split": "split", "unsafe_split_with_sizes": "split"}


def check_shared_memory(function: Callable[..., Any], step: str) -> None:
    """Check that a trace shows which memory the results of a function share.

    Raises:
        CaptureError: It does not.
    """
    if (shown := _SHOWN.get(getattr(function, "__name__", ""))) is not None:
        raise CaptureError(
            f"{user_line()}: {step} calls {function.__name__}. Its results share memory with its argument, and a trace does "
            f"not show this. A write into this memory would be lost. Call {shown} in its place [PIPER-C003]"
        )


def returned_argument(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the argument that a dropout returns unchanged, because it does not train or its probability is 0. Return
    None for any other call."""
    if getattr(function, "__name__", "") != "dropout":
        return None
    given = {**dict(zip(("input", "p", "train"), args, strict=False)), **kwargs}
    x, p, train = given.get("input"), given.get("p"), given.get("training", given.get("train", True))
    inactive = train is False or (type(p) in (int, float) and p == 0)
    return x if inactive and isinstance(x, torch.Tensor) else None
