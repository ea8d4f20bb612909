"""The precisions in which a captured step can be trained, and the collective work of their plugins: overflow
detection and clipping by norm."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_piper.common.lightning_packages import is_a, is_exactly
from lightning_piper.errors import PiperError
from lightning_piper.holdings.norms import GlobalNorms
from lightning_piper.processes.world import World

ACCEPTED = "'32-true', '64-true', '16-true', 'bf16-true', 'bf16-mixed' and '16-mixed'"


def check_precision(plugin: Precision) -> None:
    """Check that Piper supports the precision.

    Raises:
        PiperError: Piper does not support it. The error names it.
    """
    good = is_exactly(plugin, Precision, DoublePrecision) or (
        is_a(plugin, HalfPrecision, MixedPrecision)
        and plugin.precision in ("16-true", "bf16-true", "bf16-mixed", "16-mixed")
    )
    if not good:
        raise PiperError(
            f"PiperStrategy: the precision plugin {type(plugin).__name__}({plugin.precision!r}) is not supported. Give "
            f"Trainer(precision=...) one of {ACCEPTED}, and no precision plugin [PIPER-S001]"
        )


class LossScaling:
    """The loss scale of `16-mixed`. All processes decide together whether gradients overflowed.

    During a fit over several processes, a scaler that communicates replaces the plugin's own scaler. The
    replacement takes over the settings, the current scale, and the number of steps since the scale changed.

    Raises:
        PiperError: The optimizer is fused, and would detect overflows only in this process's gradients.
    """

    def __init__(self, plugin: Any, optimizer: Optimizer, world: World) -> None:
        self._plugin = plugin
        self._own: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
        if self._own is None or world.size == 1:
            return
        if any(group.get("fused") for group in optimizer.param_groups):
            raise PiperError(
                f"PiperStrategy: {type(optimizer).__name__}(fused=True) with precision '16-mixed' checks "
                "only the gradients of its own process for overflows, so the other processes would not skip "
                "the step. Remove fused=True, or use 'bf16-mixed' [PIPER-S004]"
            )
        everywhere = torch.distributed.group.WORLD
        enabled = self._own.is_enabled()
        self._plugin.scaler = ShardedGradScaler(world.device.type, enabled=enabled, process_group=everywhere)
        if enabled:
            self._plugin.scaler.load_state_dict(self._own.state_dict())

    @property
    def scale(self) -> float:
        """The factor by which the scaler will multiply the next loss; 1 without a scaler."""
        return 1.0 if self._own is None else float(self._plugin.scaler.get_scale())

    def remove(self) -> None:
        """Restore the plugin's own scaler, with the state from training."""
        if self._own is not None and self._plugin.scaler is not self._own:
            if self._own.is_enabled():
                self._own.load_state_dict(self._plugin.scaler.state_dict())
            self._plugin.scaler = self._own


class Clipping:
    """A replacement of a precision plugin's `clip_grad_by_norm` during a fit over several processes. It
    measures the gradients of all processes.

    The replacement is set on the plugin itself, because a user's `configure_gradient_clipping` may call the
    plugin's method.
    """

    def __init__(self, plugin: Precision, norms: GlobalNorms, world: World) -> None:
        self._plugin, self._norms = plugin, norms
        if world.size > 1:
            plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._norms.clip([p for p in self._plugin.main_params(optimizer) if p.grad is not None], clip_val)

    def remove(self) -> None:
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
