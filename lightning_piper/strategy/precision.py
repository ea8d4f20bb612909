"""Precisions that a captured step can be trained in, and gradient clipping over all processes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_piper.errors import PiperError
from lightning_piper.strategy.ownership import Ownership
from lightning_piper.strategy.world import World

ACCEPTED = "'32-true', '64-true', 'bf16-true' and 'bf16-mixed'"


def check_precision(plugin: Precision) -> None:
    """Refuse what is not tried.

    Raises:
        PiperError: names the precision.
    """
    good = type(plugin) in (Precision, DoublePrecision) or (
        isinstance(plugin, HalfPrecision | MixedPrecision) and plugin.precision in ("bf16-true", "bf16-mixed")
    )
    if not good:
        reason = " (float16 needs a loss scale that all stages agree on)" if str(plugin.precision).startswith("16") else ""
        raise PiperError(f"precision {plugin.precision!r} is not supported{reason}; accepted are {ACCEPTED}")


class GlobalNormClipping:
    """Makes `clip_grad_by_norm` of a precision plugin measure the gradients of all processes.

    On the plugin itself, for users' `configure_gradient_clipping` reaches it there too. A tied parameter counts once.
    """

    def __init__(self, plugin: Precision, ownership: Ownership, world: World) -> None:
        self._plugin, self._ownership, self._world = plugin, ownership, world
        self._names = {id(x): name for name, x in ownership.owned_params.items()}
        plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def remove(self) -> None:
        self._plugin.__dict__.pop("clip_grad_by_norm", None)

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        params = [p for p in self._plugin.main_params(optimizer) if p.grad is not None]
        grads = [p.grad for p in params if self._counts(p)]
        own = torch.nn.utils.get_total_norm(grads).to(self._world.device, torch.float64)  # type: ignore[arg-type]
        total = self._world.sum(own.square()).sqrt()
        if params:
            dtype = params[0].grad.dtype  # type: ignore[union-attr]
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, total.to(dtype))

    def _counts(self, param: Any) -> bool:
        name = self._names.get(id(param))
        return self._world.leads if name is None else self._ownership.speaks_for(name)
