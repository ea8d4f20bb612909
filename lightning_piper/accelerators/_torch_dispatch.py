"""What `_torch_groups` is for groups of processes, for operations. Tried on torch 2.13; relied on is:

- `torch.utils._python_dispatch.TorchDispatchMode`: sees each ATen operation with its arguments, in the thread that has entered it.
- `OpOverload._schema`: names and order of an operation's arguments; which of them it changes, and which of them it returns.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "schema_of"]


def schema_of(operation: Any) -> Any:
    """The `torch.FunctionSchema` of an ATen operation."""
    return operation._schema
