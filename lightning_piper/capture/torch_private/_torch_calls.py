"""torch's private names for building a graph from operations. Tested with torch 2.13.

Each entry states the behavior that the package relies on.

- `torch.autograd._get_sequence_nr`: the number that the next operation with a gradient will have. A trace
  gives an operation the number of the last such operation. It gives an operation of a backward pass the
  number of its forward operation (`node.meta["seq_nr"]`).
- `setup_stacktrace_preservation_hooks`: makes a backward pass record in `current_meta` that it runs
  (`in_grad_fn`), the number of its forward operation (`grad_fn_seq_nr`), and `GRADIENT_ACC_SPECIAL_STACK`
  while it adds gradients of one value.
- `FunctionalTensor.metadata_fns`: operations that only query a tensor, as `prim.device` does.
- `torch._C._dispatch_has_kernel_for_dispatch_key`, `autograd_would_have_decomposed`: whether an operation is
  composed of other operations (`CompositeImplicitAutograd`), and whether it runs decomposed.
- `_disable_saved_tensors_hooks_during_tracing`: a forward pass saves its values without hooks, as in a trace.
- `enable_python_dispatcher`: composite operations are decomposed as in a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import autograd_would_have_decomposed
from torch.utils._pytree import tree_leaves

__all__ = ["as_traced", "is_taken_apart", "merges_gradients", "number_backward", "only_asks", "sequence_now"]

_ASKING = frozenset({*FunctionalTensor.metadata_fns, torch.ops.prim.device.default})


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Within this context, operations run as they do in a trace."""
    with enable_python_dispatcher(), _disable_saved_tensors_hooks_during_tracing():
        yield


def only_asks(function: Any) -> bool:
    """Return whether an operation only reads properties of a tensor."""
    return function in _ASKING


def sequence_now() -> int:
    """Return the sequence number that a trace would give to an operation that runs now."""
    about = fx_traceback.current_meta
    found: int = (
        about["grad_fn_seq_nr"][-1] if about.get("in_grad_fn", 0) else torch.autograd._get_sequence_nr() - 1
    )
    return found


def number_backward(loss: torch.Tensor) -> None:
    """Make the backward pass of a loss record the sequence numbers of its operations."""
    setup_stacktrace_preservation_hooks([] if loss.grad_fn is None else [loss.grad_fn])


def merges_gradients() -> bool:
    """Return whether the current backward operation adds gradients of one value.

    torch 2.11 leaves the mark of an addition in `stack_trace` when the next operation begins, but the addition
    itself runs outside of any `in_grad_fn`.
    """
    about = fx_traceback.current_meta
    marked = fx_traceback.GRADIENT_ACC_SPECIAL_STACK in about.get("stack_trace", "")
    return marked and not about.get("in_grad_fn", 0)


@cache
def _is_made_of_others(function: Any) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return found


def is_taken_apart(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a trace would decompose this operation."""
    return _is_made_of_others(function) and bool(
        autograd_would_have_decomposed(function, tree_leaves((args, kwargs)))
    )
