"""Copy modules without running the finalizers of users' objects a second time."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Objects that `copy.deepcopy` does not copy, so that the objects inside of them are not copied.
_ATOMIC = (
    type(None), bool, int, float, complex, str, bytes, type, range, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.CodeType, torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)  # these cannot be copied


class FinalizedModule(Exception):
    """A module defines `__del__`, so that the end of a copy would run the user's code once more."""


def copy_module(module: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """Return a deep copy of a module that shares some objects with the module: the objects in `shared`, and all
    objects, other than modules, whose class defines `__del__`.

    Raises:
        FinalizedModule: the class of the module, or of a submodule, defines `__del__`.
        Exception: any error of `copy.deepcopy`.
    """
    memo = {id(x): x for x in shared}
    for value in finalized(module, memo):
        if isinstance(value, nn.Module):
            raise FinalizedModule(
                f"{type(value).__name__} defines __del__, which would also run for the copy"
            )
        memo[id(value)] = value
    return copy.deepcopy(module, memo)


def end_copies(module: nn.Module) -> None:
    """Remove unused copies of a module if it has objects whose class defines `__del__`. The copies share these objects,
    and would keep them alive."""
    owners = (vars(part).get(name) for part in module.modules() for name in ("_trainer", "_fabric"))
    if next(finalized(vars(module), map(id, owners)), None) is not None:
        gc.collect()


def finalized(value: Any, known: Iterable[int] = ()) -> Iterator[Any]:
    """Yield the objects whose class defines `__del__`, among the objects that a deep copy of `value` copies.

    Args:
        known: ids of objects that are not visited, because a copy shares them.
    """
    seen, waiting = set(known), [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _ATOMIC) or id(found) in seen:
            continue
        seen.add(id(found))
        if hasattr(type(found), "__del__") and not isinstance(found, _RUNNING):
            yield found
        else:
            waiting += gc.get_referents(found)
