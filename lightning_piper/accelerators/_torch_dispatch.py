"""Private names of torch for operations (torch 2.13). `_torch_groups` has the names for process groups.

This file relies on:

- `torch.utils._python_dispatch.TorchDispatchMode`: sees each ATen operation with its arguments, in the thread
  that has entered it.
- `OpOverload._schema`: the names and order of an operation's arguments, and which of them it changes or
  returns.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "schema_of"]


def schema_of(operation: Any) -> Any:
    """Return the `torch.FunctionSchema` of an ATen operation."""
    return operation._schema
