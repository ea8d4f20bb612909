"""Decides from the bytecode of a user's hooks whether the hooks read or change gradients, before the hooks
run. If they may, the processes must sum the gradients of each batch of an accumulation, not only with the
last batch."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import has_gradient_hooks
from lightning_piper.common.user_lines import is_installed

# Functions that read all gradients.
_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "clip_gradients"}
# Hooks that run with each batch of an accumulation.
_EACH_BATCH = {
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_zero_grad",
}
# Top-level packages whose code is not the user's.
_LIBRARIES = {
    *sys.stdlib_module_names,
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "lightning_piper",
}
# Modules of libraries that read gradients.
_LOOKS = {"lightning.pytorch.utilities.grads", "pytorch_lightning.utilities.grads"}
# Bytecode operations whose argument is the name of an attribute.
_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR"}


def hooks_may_use_gradients(module: nn.Module) -> bool:
    """Return whether a hook may read or change the gradients of each batch of an accumulation, as it could on
    one device."""
    if any(map(has_gradient_hooks, module.parameters())):
        return True
    return any({"grad", *_CLIPS} & names for hook in _hooks(module) for names in _named(hook))


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Iterate over the user's own hooks that run with each batch."""
    trainer: Any = module.trainer
    for owner in (module, *trainer.callbacks):
        for name in sorted(_EACH_BATCH):
            hook = getattr(owner, name, None)
            found = _function(hook)
            if found is not None and _package(found[1]) not in _LIBRARIES:
                yield hook


def _function(given: Any) -> tuple[Any, types.FunctionType] | None:
    """Return the object that a method is bound to (None for a plain function) and the function without its
    decorators. If `given` is neither a function nor a method, return None.

    This checks types only, because reading an attribute of a user's object may run code.
    """
    while isinstance(given, functools.partial):
        given = given.func
    owner, given = (given.__self__, given.__func__) if isinstance(given, types.MethodType) else (None, given)
    given = inspect.unwrap(given) if isinstance(given, types.FunctionType) else given
    return (owner, given) if isinstance(given, types.FunctionType) else None


def _package(function: Any) -> str:
    return str(getattr(function, "__module__", None)).split(".")[0]


def _loaded(code: types.CodeType, operations: Collection[str]) -> set[str]:
    return {x.argval for x in dis.get_instructions(code) if x.opname in operations}


def _named(hook: Any) -> Iterator[set[str]]:
    """Iterate over the names used by a hook and by the user's code that the hook calls by name.

    The search follows functions of the hook's module and of other modules, methods of the object that the
    hook belongs to, and methods of that object's attributes. Each item is the set of names of one code
    object: the attributes that the code names, and the global functions that the code uses, by the names of
    their definitions.
    """
    waiting, seen, home = [hook], set[Any](), None
    while waiting:
        found = _function(waiting.pop())
        if found is None or (found[0] is not None, found[1]) in seen:
            continue
        owner, function = found
        home = home or _package(function)
        if not _is_users(function, home):
            continue
        seen.add((owner is not None, function))
        used, names = [], set[str]()
        for code in _nested(function.__code__):
            attributes = _loaded(code, _OF_ATTRIBUTES)
            values = [function.__globals__.get(name) for name in _loaded(code, ("LOAD_GLOBAL",))]
            yield attributes | {x.__name__ for x in values if isinstance(x, types.FunctionType)}
            used += values
            names |= attributes
        used += [x for x in map(_content, function.__closure__ or ()) if x is not None]
        if owner is not None:
            used += [owner, *(_attribute(owner, name) for name in names)]
        waiting += used
        for value in used:
            if value is not None and not isinstance(
                value, torch.Tensor | types.FunctionType | types.MethodType
            ):
                waiting += [_attribute(value, name) for name in names]


def _is_users(function: types.FunctionType, home: str) -> bool:
    package, file = _package(function), function.__code__.co_filename
    own = package == home or (package not in _LIBRARIES and not is_installed(file))
    return own or function.__module__ in _LOOKS


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object. None if the attribute is missing or raises an error, or is a property.
    A property is not read, because its code would run."""
    static = inspect.getattr_static(owner, name, None)
    if isinstance(static, property | functools.cached_property):
        return None
    try:
        return getattr(owner, name, None)
    except Exception:  # the user's own __getattr__ may raise anything
        return None
