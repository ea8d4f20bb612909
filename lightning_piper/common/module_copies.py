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
    copied = copy.deepcopy(module, memo)
    new = {id(made) for known, made in memo.items() if id(made) != known}
    for part in copied.modules():
        for owner, holder in [(part, vars(part)), *((x, x) for x in vars(part).values())]:
            if isinstance(holder, (dict, list)) and id(owner) in new:  # attributes, hooks, containers
                _use_copies(holder, memo)
    return copied


def _use_copies(holder: Any, memo: dict[int, Any]) -> None:
    """Replace the functions in a dict or list that use objects which a deep copy has copied, by functions that use the
    copies. `copy.deepcopy` keeps functions: a forward hook `lambda m, x, out: self.features.append(out)` would write to
    the module from which the copy was made."""
    for key, value in [*(holder.items() if isinstance(holder, dict) else enumerate(holder))]:
        if (made := _with_copies(value, memo)) is not value:
            holder[key] = made


def _with_copies(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of an object, and for a function the function whose closure and defaults have the copies. Return
    the object itself if it is not copied and uses no copy."""
    if isinstance(value, types.MethodType) and id(value) not in memo:
        owner = _with_copies(value.__self__, memo)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if not isinstance(value, types.FunctionType) or id(value) in memo:
        return memo.get(id(value), value)
    memo[id(value)] = value  # for a function that calls itself
    cells = tuple(_cell_with_copies(cell, memo) for cell in value.__closure__ or ())
    defaults = tuple(_with_copies(x, memo) for x in value.__defaults__ or ())
    named = {name: _with_copies(x, memo) for name, x in (value.__kwdefaults__ or {}).items()}
    new = (*cells, *defaults, *named.values())
    old = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if any(x is not y for x, y in zip(new, old, strict=True)):
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        made.__kwdefaults__, made.__qualname__ = named, value.__qualname__
        made.__dict__.update(vars(value))
        memo[id(value)] = made
    return memo[id(value)]


def _cell_with_copies(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    """Return the cell of a closure with the copy of its content. Functions that share a cell share the new cell."""
    try:
        made = _with_copies(cell.cell_contents, memo)
    except ValueError:  # an empty cell
        return cell
    if made is cell.cell_contents:
        return cell
    new: types.CellType = memo.setdefault(id(cell), types.CellType(made))
    return new


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
