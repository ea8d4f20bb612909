"""Which parameters of the module have gradients that are on other processes, or here in pieces."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_piper.compiler import Compiled
from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.ownership import Ownership


def absent(ownership: Ownership, compiled: Compiled) -> dict[str, torch.nn.Parameter]:
    """The module's parameters that get gradients, but not whole in this process."""
    used: set[str] = set().union(*(compiled.params_on(device) for device in compiled.plans))
    return {name: x for name, x in ownership.params.items() if x.is_meta and x.requires_grad and name in used}


def mark(params: Mapping[str, torch.nn.Parameter], local_shards: Mapping[str, torch.Tensor]) -> None:
    """Give these parameters gradients that are elsewhere, before the next ones come.

    Args:
        local_shards: of some, with gradients of their own, which go or become zero with the parameter's (`module.zero_grad()`).
    """
    for name, param in params.items():
        if not isinstance(param.grad, Elsewhere):
            param.grad = Elsewhere.of(param, name, local_shards.get(name))
