"""The one file that uses torchmetrics' private names. Tested with torchmetrics 1.9.

Each entry states the behavior that the package relies on.

- `_*_tensor_validation` in modules of `torchmetrics.functional`: checks the values of predictions and
  targets, and raises an error for invalid ones. A traced step has no values, so the checks are skipped, as
  with `validate_args=False`.
- `_bincount` in modules of `torchmetrics`: counts with `torch.bincount`, whose output size depends on values
  even if `minlength` bounds them. If torch has no such kernel, torchmetrics compares with all classes, which
  gives the same counts.
- `normalize_logits_if_needed` in modules of `torchmetrics`: on CPU, an `if` decides whether predictions are
  logits. On other devices, `torch.where` decides.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

_VALIDATION = re.compile(r"_\w+_tensor_validation")


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within this context, torchmetrics' functions in `_replaced_in` are replaced by functions that do not
    read tensor values."""
    found = _replaced_in(tuple(name for name in sys.modules if name.startswith("torchmetrics.")))
    put = [(names, key, names[key]) for names, key in found]
    for names, key, _ in put:
        names[key] = _REPLACED.get(key, _validation)
    try:
        yield
    finally:
        for names, key, own in put:
            names[key] = own


@functools.lru_cache(1)
def _replaced_in(modules: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    """Return the names to replace in these modules, each with the module's dict.

    The result is cached, because a step is traced often, and there are hundreds of modules.
    """
    names = [vars(sys.modules[name]) for name in modules]
    return [(own, key) for own in names for key in own if key in _REPLACED or _VALIDATION.fullmatch(key)]


def _validation(*args: Any, **kwargs: Any) -> None:
    return None


def _bincount(x: torch.Tensor, minlength: int | None = None) -> torch.Tensor:
    if minlength is None:
        minlength = len(torch.unique(x))
    return torch.eq(x.reshape(-1, 1), torch.arange(minlength, device=x.device)).sum(dim=0)


def _normalized(tensor: torch.Tensor, normalization: str | None) -> torch.Tensor:
    """Return probabilities: the tensor itself if all its values are between 0 and 1, and otherwise its
    sigmoid or softmax. Without a `normalization`, return the tensor."""
    if not normalization:
        return tensor
    known = (
        torch.all((tensor >= 0) * (tensor <= 1))
        if tensor.device.type == "cpu"
        else ~((tensor < 0) | (tensor > 1)).any()
    )
    return torch.where(
        known, tensor, tensor.sigmoid() if normalization == "sigmoid" else torch.softmax(tensor, dim=1)
    )


_REPLACED = {"_bincount": _bincount, "normalize_logits_if_needed": _normalized}
