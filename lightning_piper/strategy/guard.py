"""Stops a training before the optimizer's update if a gradient is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_piper.errors import ExecutionError
from lightning_piper.holdings._torch_foreach import any_nonfinite
from lightning_piper.holdings.remote_gradient import RemoteGradient
from lightning_piper.processes.world import World, of_rank
from lightning_piper.runtime.watching import tensors_in
from lightning_piper.session.first_operation import NonFinite, WatchedUncaptured, nan_in
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.fit import Fit
from lightning_piper.strategy.phases import Eager, Fitting, Phase

if TYPE_CHECKING:
    import lightning.pytorch as pl


# A batch norm has updated its statistics, and LBFGS moves the parameters between two calls of its closure.
CHANGED = "buffers may have changed in this step. With an optimizer that calls its closure twice, parameters may have changed too"
RESUME = "Correct the cause, and resume from an earlier checkpoint or start again"


@dataclass
class _Pending:
    """The flag of a step whose value the host has not read yet.

    Attributes:
        flag: Whether a gradient is NaN or infinite, on its way to the host.
        arrived: Done when `flag` is on the host.
        skipped: Whether the optimizer has skipped the update if the flag is set.
    """

    flag: torch.Tensor
    arrived: torch.Event
    skipped: bool
    step: int


class NanGuard:
    """A check of all gradients of an optimizer, after clipping and hooks and before the update.

    On a CPU, the check raises before the update. On an accelerator, the host does not wait for the flag: it
    reads the flag of a step at the next check, or in `settle`. A fused optimizer skips the update on the
    device if the flag is set; another optimizer has made the update by then.

    If not all processes have the same gradients, the processes share the flag in one small sum, unless
    clipping by norm has just measured all gradients. With a loss scale, the scaler skips the update of
    infinite gradients, and the guard checks nothing.

    Args:
        module: The module that is trained.
        plugin: The Trainer's precision plugin.
        phase: Returns the current phase of the strategy.
        on: Whether to check anything.
    """

    def __init__(self, module: pl.LightningModule, plugin: Any, phase: Callable[[], Phase], on: bool) -> None:
        self._module, self._plugin, self._phase = module, plugin, phase
        self._pending: _Pending | None = None
        # The last uncaptured step: it runs again if this is called, with this state of the random numbers.
        self._again: Callable[[], Any] | None = None
        self._random = torch.empty(0)
        self._batch: Any = None
        self._on = on
        self._end = _lightning.before_updates(plugin, self.check) if on else lambda: None

    def check(self, optimizer: Optimizer) -> None:
        """Check the gradients of an optimizer.

        Raises:
            ExecutionError: A gradient is NaN or infinite, on any process.
        """
        phase = self._phase()
        if getattr(self._plugin, "scaler", None) is not None or not isinstance(phase, Fitting | Eager):
            return
        fit = phase.fit if isinstance(phase, Fitting) else None
        world = phase.before.world if isinstance(phase, Eager) else phase.fit.world
        grads = _gradients(optimizer)
        flag = any_nonfinite(grads, world.device) if fit is None else fit.nonfinite(grads)
        if world.device.type != "cpu":
            self._defer(flag.float().reshape(1), optimizer)
        elif flag.item():
            self._stop(optimizer, fit, world)

    def remove(self) -> None:
        """End the checks."""
        self._end()

    def settle(self) -> None:
        """Read the flag of the last step, if the host has not read it yet.

        Raises:
            ExecutionError: A gradient was NaN or infinite.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.arrived.synchronize()
        if not pending.flag.item():
            return
        after = (
            f"The optimizer has skipped this update, but {CHANGED}. {RESUME}"
            if pending.skipped
            else f"The parameters include this update. {RESUME}. To skip such an update on the device, use an "
            "optimizer with fused=True"
        )
        raise ExecutionError(
            f"PiperStrategy: a gradient of step {pending.step} was NaN or infinite. {after}. "
            "To train despite such gradients, pass PiperStrategy(stop_on_nan=False) [PIPER-X006]"
        )

    def note(self, again: Callable[[], Any], batch: Any) -> None:
        """Keep an uncaptured step, which calling `again` runs again, and its batch."""
        if self._on:
            self._again, self._batch, self._random = again, batch, torch.get_rng_state()

    def _first_uncaptured(self, world: World) -> str | None:
        """Run the last uncaptured step again, and return a text about the first NaN or infinity in it; None
        if there is none, or if the step also steps its optimizers. Collective."""
        module, causes = self._module, NonFinite()
        if self._again is None or not module.automatic_optimization:
            return None
        leaves = [(f"tensor {i} of the batch", x) for i, x in enumerate(tensors_in(self._batch))]
        params = [x for x in module.parameters() if x.requires_grad]
        found = nan_in(leaves, dict(module.named_parameters()), world)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            WatchedUncaptured(causes.see).run(self._again, params)
        everyones = [each for own in world.gather([*found, *causes.found]) for each in own]
        return min(everyones)[2] if everyones else None

    def _defer(self, flag: torch.Tensor, optimizer: Optimizer) -> None:
        """Start to copy a flag to the host, after a check of the flag before. A fused optimizer then skips its
        update on the device if the flag is set, as under torch's `GradScaler`."""
        self.settle()
        skips = all(group.get("fused") for group in optimizer.param_groups)
        if skips:
            optimizer.found_inf = flag  # type: ignore[attr-defined]
        host = flag.to("cpu", non_blocking=True)  # pinned memory
        arrived = torch.Event(flag.device)
        arrived.record()
        self._pending = _Pending(host, arrived, skips, self._module.global_step)

    def _stop(self, optimizer: Optimizer, fit: Fit | None, world: World) -> None:
        """Raise the error on all processes, unless no gradient is NaN or infinite (a norm may overflow).
        Collective."""
        held = {} if fit is None else fit.ownership.owned_params
        names = {id(x): name for name, x in [*self._module.named_parameters(), *held.items()]}
        bad = [
            names.get(id(x), "a parameter outside of the module")
            for group in optimizer.param_groups
            for x in group["params"]
            if (grad := _gradient(x)) is not None and not grad.isfinite().all()
        ]
        everyones = world.gather(bad)
        found = list(dict.fromkeys(name for each in everyones for name in each))
        if not found:
            return
        first = self._first_uncaptured(world) if fit is None else fit.first_nonfinite()
        rank = next(rank for rank, each in enumerate(everyones) if each)
        more = f" and of {len(found) - 1} more" if len(found) > 1 else ""
        cause = (
            f"The first cause: {first}"
            if first is not None
            else "Piper does not run a manual optimization again, so the first cause is unknown"
            if fit is None and not self._module.automatic_optimization
            else "A second run of the last batch did not show the cause. Look at earlier batches of an "
            "accumulation, at code after the backward pass, and at random numbers"
        )
        raise of_rank(
            world.members[rank],
            ExecutionError(
                f"PiperStrategy: the gradient of {found[0]!r}{more} is NaN or infinite in step "
                f"{self._module.global_step}. {cause}. "
                f"The optimizer has not applied this gradient, but {CHANGED}. {RESUME}. "
                "To train despite such gradients, pass PiperStrategy(stop_on_nan=False) [PIPER-X006]"
            ),
        )


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    found = [_gradient(x) for group in optimizer.param_groups for x in group["params"]]
    return [grad for grad in found if grad is not None]


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a parameter's gradient on this process; None if there are none."""
    grad = param.grad
    if grad is None or isinstance(grad, RemoteGradient):
        return None
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
