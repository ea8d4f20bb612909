"""Adapters for parts of Lightning and its callbacks that assume the whole module, or separate data, on every
process."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, ThroughputMonitor, WeightAveraging
from lightning.pytorch.utilities import grad_norm as norm_in_one_process
from torchmetrics import Metric

from lightning_piper.checkpoint.state import ranges_of, reference, referenced
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.common.lightning_packages import is_a
from lightning_piper.errors import PiperError
from lightning_piper.holdings.copies import Copy, Refer, averages_each_element
from lightning_piper.holdings.norms import norms_of_each
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World
from lightning_piper.session.metric_objects import Gather, whole_lists
from lightning_piper.strategy._lightning import copy_of, throughputs_of, update_of

Suspended = list[tuple[Any, str, Any]]  # (owner, attribute, value to restore)


def suspend(module: pl.LightningModule, world: World) -> Suspended:
    """Switch off features that assume that every process has the whole module or separate data. `resume`
    switches these features on again. It needs the result of this function. With one process, the result is
    empty.

    Summaries and graph logging would run the module on its `example_input_array`, which is set to None.
    `Metric.sync` would sum over all processes, although the processes of one replica see the same batches.
    Its replacement counts each replica once.
    """
    # Lightning recommends `sync_dist=True` for every log while torch.distributed runs. In a captured step,
    # `sync_dist` would change nothing. `resume` leaves this filter in place.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
    if world.size == 1:
        return []
    found: Suspended = [
        (module, "example_input_array", module.example_input_array),
        (Metric, "sync", Metric.sync),
    ]
    module.example_input_array = None
    Metric.sync = _over_replicas(Metric.sync, module.trainer.strategy)  # type: ignore[method-assign]
    return found


def _over_replicas(own: Callable[..., None], strategy: Any) -> Callable[..., None]:
    """Return a replacement of `Metric.sync` that counts each replica once."""

    @functools.wraps(own)
    def sync(
        self: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any | None = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        world = strategy.counted
        gathers = dist_sync_fn or Gather(world)
        with whole_lists(self, gathers) if isinstance(gathers, Gather) else contextlib.nullcontext():
            own(self, gathers, process_group, should_sync and world.count > 1, distributed_available)

    return sync


def count_once(module: pl.LightningModule, world: World) -> None:
    """Reset metrics on all replicas except the first, after every process has loaded a checkpoint whose
    metric states cover all samples. So a sum over replicas counts each of these samples once."""
    for part in module.modules() if world.replica > 0 else ():
        if isinstance(part, Metric) and part.state_dict():
            part.reset()


def resume(suspended: Suspended) -> None:
    """Restore the attributes that `suspend` has changed."""
    for owner, name, value in suspended:
        setattr(owner, name, value)


# Names of the Python modules in which Lightning defines its own hooks. A hook from one of them does nothing
# or has the default behavior.
_HOOKS = {
    f"{package}.{name}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for name in ("core.module", "core.hooks", "callbacks.callback")
}


def is_default(hook: Any) -> bool:
    """Return whether a hook is Lightning's own, which does nothing or has the default behavior."""
    return getattr(hook, "__module__", None) in _HOOKS


def drops_gradients(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Lightning drops the previous step's gradients unread before the next backward pass.

    Return False in manual optimization, if a hook may read the gradients before they are dropped, or if the
    module or its optimizer overrides the method that zeroes them.
    """
    trainer: Any = module.trainer
    hooks = [module.optimizer_zero_grad, *(x.on_before_zero_grad for x in (module, *trainer.callbacks))]
    own = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer)
    return module.automatic_optimization and not own and all(map(is_default, hooks))


def count_replicas(trainer: pl.Trainer, world: World) -> None:
    """Make throughput monitors multiply a process's numbers by the number of replicas, not of processes. In
    a monitor's reports, a device is then a replica."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_a(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):  # a new one for each fit
                if throughput.available_flops is not None:
                    throughput.available_flops *= world.size // world.count
                throughput.world_size = world.count


def grad_norm(
    module: pl.LightningModule, norm_type: float | str = 2, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient and of all gradients together.

    The function is like `lightning.pytorch.utilities.grad_norm`, but covers the whole module even if the
    module is on several processes. Then the function is collective: call it on all processes, as in a hook.

    Args:
        module: A module in a fit, with any strategy.
        norm_type: Order p of the norm, above zero; `inf` for the largest element.
        group_separator: Separator between the prefix and the parameter's name.

    Returns:
        `grad_{p}_norm/{name}` -> norm, for every parameter that has a gradient, and `grad_{p}_norm_total`.
            The norms are the same on all processes. Empty if no parameter has a gradient.

    Raises:
        PiperError: `norm_type` is not above zero, and the module is on several processes.
    """
    strategy: Any = module.trainer.strategy
    fit = getattr(getattr(strategy, "phase", None), "fit", None)
    if fit is None or fit.ownership.whole:
        return norm_in_one_process(module, norm_type, group_separator)  # type: ignore[return-value]
    p = -1.0
    with contextlib.suppress(TypeError, ValueError):
        p = float(norm_type)
    if not p > 0:
        raise PiperError(
            f"grad_norm(norm_type={norm_type!r}) is not usable. Give a number above zero, or 'inf' [PIPER-S008]"
        )
    found = norms_of_each(fit.ownership, fit.world, p)
    named = {f"grad_{p}_norm{group_separator}{name}": norm for name, norm in found.items()}
    if named:
        named[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(named.values())), p)
    return named


# Averages of the weights

# Hooks that run as the callback defines them, because the module, or the copy's state dict, is whole then.
_AS_THEY_ARE = ("setup", "teardown", "on_load_checkpoint", "on_save_checkpoint")


def averaging(trainer: pl.Trainer) -> list[Any]:
    """Return the Trainer's callbacks that average the module's weights."""
    return [x for x in trainer.callbacks if is_a(x, WeightAveraging, StochasticWeightAveraging)]  # type: ignore[attr-defined]


class Averages:
    """The callbacks of one run that average the module's weights, and their copies of the module.

    The callbacks iterate over the tensors of the module and of the copy together, to update the average or to
    put the average into the module. So a copy is distributed like the module. While a hook of these callbacks
    runs, until `release`, the tensors of the module and the copy are this process's shards.

    Args:
        in_ranges: Returns whether checkpoints have references to tensors that are saved in ranges.
    """

    def __init__(self, trainer: pl.Trainer, in_ranges: Callable[[], bool]) -> None:
        self._callbacks, self._in_ranges = averaging(trainer), in_ranges
        self._module: Ownership | None = None
        self._copies: dict[str, Copy] = {}
        # (callback, hook, replacement, whether the user has set the hook on the instance, original)
        self._replaced: list[tuple[Any, str, Any, bool, Any]] = []
        for callback in self._callbacks:
            for name in _hooks(callback):
                on_instance, hook = name in vars(callback), getattr(callback, name)
                replacement = self._in_pieces(hook)
                setattr(callback, name, replacement)
                self._replaced.append((callback, name, replacement, on_instance, hook))

    def distribute(self, own: Ownership) -> None:
        """Distribute the copies when the module is distributed, until it is whole again. Collective.

        Args:
            own: The distribution of the module.

        Raises:
            PiperError: A callback's average is not elementwise, and a process does not have all elements.
        """
        if own.whole:
            return
        self._module, self._copies = own, {}
        for number, callback in enumerate(self._callbacks):
            module = copy_of(callback)
            if module is None:
                continue
            if not own.tensor_map.is_replicated and not averages_each_element(update_of(callback)):
                raise PiperError(
                    f"PiperStrategy: {type(callback).__name__} must average each element of the parameters independently, "
                    "because each process holds only a part of the parameters (stages or shards), but a test on shards "
                    "failed. Give it an avg_fn that works element by element, such as "
                    "torch.optim.swa_utils.get_ema_avg_fn(), and no multi_avg_fn [PIPER-S002]"
                )
            prefix = f"averages.{number}"
            self._copies[prefix] = found = Copy(module, own, functools.partial(self._refer, prefix))
            found.distribute()
            own.copies.append(found)

    def _refer(self, prefix: str) -> Refer | None:
        return (lambda name: reference(f"{prefix}.{name}")) if self._in_ranges() else None

    def ranges(self, content: Any, names: Collection[str] | None = None) -> list[TensorRange]:
        """Return this process's part of the copies' tensors with these canonical names to which the content of a
        checkpoint refers. None stands for all names."""
        ranges = [x for prefix, found in self._copies.items() for x in ranges_of(found, prefix, names)]
        keys = referenced(content) if ranges else set()
        return [x for x in ranges if x.key in keys]

    def release(self) -> None:
        """Restore the callbacks' own hooks, at the end of the run. A hook that the user has set on a callback
        stays, whether the user set it before the run or during the run."""
        for callback, name, replacement, on_instance, hook in self._replaced:
            if vars(callback).get(name) is replacement:
                if on_instance:
                    setattr(callback, name, hook)
                else:
                    delattr(callback, name)
        self._callbacks, self._replaced = [], []

    def _in_pieces(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `hook` while the tensors of the module and its copies are this
        process's shards. Before the first batch, and after `release`, it only calls `hook`."""

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for own in () if self._module is None else (self._module, *self._module.copies):
                    own.check_unwritten()
                    stack.enter_context(own.pieces())
                return hook(*args, **kwargs)

        return run


def _hooks(callback: Any) -> list[str]:
    """Return the names of the `on_...` hooks that a callback's classes define, except `_AS_THEY_ARE`."""
    own = [vars(cls) for cls in type(callback).__mro__ if cls.__name__ not in ("Callback", "object")]
    return sorted(
        {name for names in own for name in names if name.startswith("on_") and name not in _AS_THEY_ARE}
    )
