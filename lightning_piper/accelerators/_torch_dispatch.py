"""Private names of torch for operations (torch 2.13). `_torch_groups` has the names for process groups.

This file relies on:

- `torch.utils._python_dispatch.TorchDispatchMode`: sees each ATen operation with its arguments, in the thread
  that has entered it. With `supports_higher_order_operators`, it also sees operators of higher order, which have no
  schema. Its `_should_skip_dynamo()` decides whether its first operation imports Dynamo, which takes a second.
- `_len_torch_dispatch_stack`, `_get_current_dispatch_mode`: the modes of this thread. The end of a mode removes the
  innermost mode, whichever it is.
- `OpOverload._schema`: the names and order of an operation's arguments, and which of them it changes or
  returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)

__all__ = [
    "OperationWatch",
    "TorchDispatchMode",
    "aliased_arguments",
    "is_innermost",
    "modes_are_active",
    "schema_of",
]


def schema_of(operation: Any) -> Any:
    """Return the `torch.FunctionSchema` of an ATen operation."""
    return operation._schema


@cache
def _aliased(operation: Any, changed: bool) -> Mapping[str, int] | None:
    """Return name -> position of each argument of `aliased_arguments`. None for an operator without a schema."""
    if not hasattr(operation, "_schema"):
        return None
    arguments = enumerate(operation._schema.arguments)
    found = [(x, i) for i, x in arguments if x.alias_info is not None]
    return {x.name: i for x, i in found if x.alias_info.is_write or not changed}


def aliased_arguments(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], changed: bool = False
) -> list[Any]:
    """Return the arguments that an operation changes or returns an alias of, according to its schema. With `changed`,
    return only arguments that it changes. Without a schema, return all arguments."""
    if (aliased := _aliased(operation, changed)) is None:
        return [*args, *kwargs.values()]
    return [args[i] if i < len(args) else kwargs.get(name) for name, i in aliased.items()]


def modes_are_active() -> bool:
    """Return whether this thread is in any mode."""
    return _len_torch_dispatch_stack() > 0


def is_innermost(mode: TorchDispatchMode) -> bool:
    """Return whether this thread has entered this mode last, among its active modes."""
    return _get_current_dispatch_mode() is mode


class OperationWatch(TorchDispatchMode):
    """A mode that calls `before` for each operation, and then runs the operation."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave the mode, which must be the innermost mode of this thread."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def before(self, operation: Any, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before(func, args, kwargs)
        return func(*args, **kwargs)
