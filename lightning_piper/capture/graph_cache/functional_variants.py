"""The form that a trace gives to the operations of a run: without changes of memory, and without arguments that equal
their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_piper.capture.torch_private import _torch

aten = torch.ops.aten
# Operation that changes its first argument -> functional variant, if the names do not follow the rule.
_OTHER_NAMES = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}


def functional_variant(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, torch.Tensor] | None:
    """Return the functional variant of an operation that has changed its first argument (`aten.add.Tensor` for
    `aten.add_.Tensor`), and the variant's result. Return None if there is no such variant, if the operation has changed
    the layout of its argument (`unsqueeze_`), or if the argument is not a view and the layout of the result differs."""
    name = function.overloadpacket.__name__
    writes = [x.alias_info is not None and x.alias_info.is_write for x in function._schema.arguments]
    packet = (
        getattr(aten, name[:-1], None)
        if function.namespace == "aten" and name[-1:] == "_" != name[-2:-1]
        else None
    )
    target = _OTHER_NAMES.get(function, getattr(packet, function._overloadname, None))
    if target is None or target._schema.is_mutable or torch.Tag.inplace_view in function.tags:
        return None
    if writes != [True] + [False] * (len(writes) - 1):
        return None
    made = target(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or not (args[0]._is_view() or _layout(made) == _layout(args[0])):
        return None
    return target, made


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def without_defaults(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as torch passes them to a tracer: without arguments that equal their defaults,
    wherever possible."""
    arguments = _torch.arguments_of(function)
    placed, named = list(args), dict(kwargs)
    by_position = [x for x in arguments if not x.kwarg_only]
    for x in by_position[len(placed) :]:
        if x.name not in named and not x.has_default_value():
            break
        placed.append(named.pop(x.name, x.default_value))
    while placed and _is_default(by_position[len(placed) - 1], placed[-1]):
        placed.pop()
    return tuple(placed), {
        x.name: named[x.name] for x in arguments if x.name in named and not _is_default(x, named[x.name])
    }


def _is_default(argument: Any, given: Any) -> bool:
    if not argument.has_default_value() or isinstance(given, torch.Tensor):
        return False
    default = argument.default_value
    return type(given) is type(default) and bool(given == default)
