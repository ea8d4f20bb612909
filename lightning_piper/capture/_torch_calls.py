"""torch's private names for what a graph out of operations needs. Tried on torch 2.13; each entry says what is relied on.

- `torch.autograd._get_sequence_nr`: the number that the next operation with a gradient will have. A trace gives an operation
  that of the last one, and one of a backward pass that of its forward operation (`node.meta["seq_nr"]`).
- `setup_stacktrace_preservation_hooks`: lets a backward pass say meanwhile in `current_meta` that it runs (`in_grad_fn`), of which
  forward operation (`grad_fn_seq_nr`), and `GRADIENT_ACC_SPECIAL_STACK` where it adds gradients of one value.
- `FunctionalTensor.metadata_fns`: operations that only ask about a tensor; so does `prim.device`.
- `torch._C._dispatch_has_kernel_for_dispatch_key`, `autograd_would_have_decomposed`: is an operation made of others
  (`CompositeImplicitAutograd`), and is that how it runs?
- `_disable_saved_tensors_hooks_during_tracing`: what a forward pass keeps, it keeps as in a trace, without hooks.
- `enable_python_dispatcher`: operations that are made of others are taken apart as in a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import autograd_would_have_decomposed

__all__ = ["as_traced", "is_taken_apart", "merges_gradients", "number_backward", "only_asks", "sequence_now"]

_ASKING = frozenset({*FunctionalTensor.metadata_fns, torch.ops.prim.device.default})


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Inside, operations run as they do in a trace."""
    with enable_python_dispatcher(), _disable_saved_tensors_hooks_during_tracing():
        yield


def only_asks(function: Any) -> bool:
    """Does an operation only ask about a tensor?"""
    return function in _ASKING


def sequence_now() -> int:
    """The number that a trace would give an operation now."""
    about = fx_traceback.current_meta
    found: int = about["grad_fn_seq_nr"][-1] if about.get("in_grad_fn", 0) else torch.autograd._get_sequence_nr() - 1
    return found


def number_backward(loss: torch.Tensor) -> None:
    """Let the backward pass of a loss number its operations."""
    setup_stacktrace_preservation_hooks([] if loss.grad_fn is None else [loss.grad_fn])


def merges_gradients() -> bool:
    """Is the operation of a backward pass one that adds gradients?"""
    return fx_traceback.GRADIENT_ACC_SPECIAL_STACK in fx_traceback.current_meta.get("stack_trace", "")


@cache
def _is_made_of_others(function: Any) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return found


def is_taken_apart(function: Any, arguments: Sequence[Any]) -> bool:
    """Would a trace have others in the place of this operation?"""
    return _is_made_of_others(function) and bool(autograd_would_have_decomposed(function, arguments))
