"""The state of a module that the next steps need, but that is not in its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_piper.session.metric_objects import metric_states, restore_metric_states

State = dict[str, Any]


def dtypes_of(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and buffer, by name."""
    return {name: x.dtype for name, x in chain(module.named_parameters(), module.named_buffers())}


def restore_dtypes(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert parameters and buffers to these dtypes. The Trainer converts the module only after callbacks have copied
    it, so a fit that begins again must find the dtypes from before."""
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if dtypes.get(name, x.dtype) != x.dtype:
            x.data = x.data.to(dtypes[name])


def state_beside(module: nn.Module, gradients: bool) -> State:
    """Return the modes of all modules, `requires_grad` of all parameters, and the states of metric objects.

    Args:
        module: The module.
        gradients: Whether to return the gradients as well. An uncaptured step may accumulate them over batches.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        "modes": [each.training for each in module.modules()],
        "trained": {name: p.requires_grad for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items() if gradients and p.grad is not None},
        "metrics": metric_states(module),
    }


def restore_modes(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore only the modes of all modules from a result of `state_beside`."""
    for each, training in zip(module.modules(), state["modes"], strict=True):
        each.training = training


def restore_beside(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore all that `state_beside` has returned."""
    restore_modes(module, state)
    for name, p in module.named_parameters(remove_duplicate=False):
        p.requires_grad_(state["trained"][name])
        p.grad = state["gradients"].get(name)
    restore_metric_states(module, state["metrics"])
