"""Checks, before any training, that a Trainer and a module use only features that this strategy supports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_piper.accelerators.kinds import HOST, backend_of
from lightning_piper.capture import has_gradient_hooks
from lightning_piper.common.lightning_packages import is_a
from lightning_piper.common.limits import is_number, shown
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import restricted
from lightning_piper.holdings.elementwise import goes_in_parts
from lightning_piper.holdings.materialization import Known, is_on_meta, without_initial_values
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.session.local_sgd import LocalSGD
from lightning_piper.session.verification import ACCEPTED
from lightning_piper.strategy.checkpoints import is_behind, warn_of_unused_last
from lightning_piper.strategy.compatibility import is_default

# Argument of `PiperStrategy` that accepts only a few texts -> these texts.
CHOICES = {
    "verify": ACCEPTED,
    "transport": ("process", "local", "simulated"),
    "checkpoint": ("consolidated", "sharded"),
    "accumulate": ("batches", "tokens"),
    "capture": ("auto", "always", "never"),
}


def check_fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    processes: int,
    layer_sync: LayerSync | None,
    known: Known,
) -> None:
    """Check that Piper supports everything that a fit uses. Warn if the fit does not use the last checkpoint of
    its remote folder.

    Args:
        module: The module to be trained.
        processes: Number of processes over which the module will be distributed.
        layer_sync: The Trainer's plugin for synchronized layers: Lightning's own with `sync_batchnorm=True`;
            None without a plugin.
        known: Values from a checkpoint for tensors on the meta device.

    Raises:
        PiperError: Something is unsupported; the error says what, why, and what to do.
    """
    problem = next(_problems(trainer, module, layer_sync, known), None)
    if problem is None and processes > 1:
        problem = next(_problems_of_processes(trainer, module), None)
    if problem is not None:
        raise PiperError(f"PiperStrategy: {problem}")
    warn_of_unused_last(trainer)


def _problems(
    trainer: pl.Trainer, module: pl.LightningModule, layer_sync: LayerSync | None, known: Known
) -> Iterator[str]:
    """Yield each reason why Piper cannot run a fit, on any number of processes."""
    if layer_sync is not None and not is_a(layer_sync, TorchSyncBatchNorm):
        yield (
            f"the plugin {type(layer_sync).__name__} would replace layers of the module by layers that "
            "communicate on their own, which the directives do not describe. Use "
            "Trainer(sync_batchnorm=True): batch norms then compute their statistics over the whole batch"
            " [PIPER-S002]"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm) and part.process_group not in (
            None,
            torch.distributed.group.WORLD,
        ):
            yield (
                f"{name} is a SyncBatchNorm with its own process group, but Piper computes its statistics "
                "over all replicas. Do not give it a process_group [PIPER-S002]"
            )
    problem = without_initial_values(module, known)
    if problem is not None:
        yield problem
    behind = is_behind(trainer.strategy.checkpoint_io, "")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if behind and is_a(callback, ModelCheckpoint) and callback.save_last == "link":
            yield (
                "ModelCheckpoint(save_last='link') links to a checkpoint that AsyncCheckpointIO has not "
                "written yet. If writing it fails, there is no last checkpoint. Use save_last=True"
                " [PIPER-S002]"
            )
    yield from _problems_of_averages(trainer, module)


def check_averages(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise an error if a callback would copy a module without values. Callbacks copy before `check_fit`."""
    if (problem := next(_problems_of_averages(trainer, module), None)) is not None:
        raise PiperError(f"PiperStrategy: {problem}")


def _problems_of_averages(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_a(callback, WeightAveraging, StochasticWeightAveraging) and is_on_meta(module):
            yield (
                f"the callback {type(callback).__name__} copies the module, which is on the meta device and "
                "has no values yet. Build the module with values [PIPER-S009]"
            )


def _is_reached(epoch: int, trainer: pl.Trainer) -> bool:
    """Return whether a fit reaches this epoch, and the epoch is not the first (number 0)."""
    return epoch > 0 and (trainer.max_epochs in (None, -1) or epoch < trainer.max_epochs)


def _problems_of_processes(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    """Yield each reason why Piper cannot run a fit on several processes."""
    if trainer.enable_validation:
        yield from _problems_of_evaluation(module, "validation_step")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if is_a(callback, OnExceptionCheckpoint) or (
            is_a(callback, ModelCheckpoint) and callback.save_on_exception
        ):
            yield (
                f"{name} saves when a process has failed, but a checkpoint needs all processes, so the other "
                "processes would wait forever. Save every few steps instead: "
                "ModelCheckpoint(every_n_train_steps=...) [PIPER-S002]"
            )
        if is_a(callback, BatchSizeFinder):
            yield (
                f"{name} tries larger batches until a process runs out of memory, and then the other "
                "processes would wait forever. Choose batch_size yourself [PIPER-S002]"
            )


def _problems_of_evaluation(module: pl.LightningModule, *names: str) -> Iterator[str]:
    for name in names:
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            yield (
                f"{name}(dataloader_iter) draws its own batches, so Piper has no batch to capture. Take "
                "(batch, batch_idx) [PIPER-S002]"
            )


def check_evaluation(module: pl.LightningModule, known: Known, local: bool) -> None:
    """Check that Piper supports everything that an evaluation without a fit uses.

    Args:
        module: The module to be evaluated.
        known: Values from a checkpoint for tensors on the meta device.
        local: Whether Lightning runs the evaluation in one process.

    Raises:
        PiperError: Something is unsupported; the error says what, why, and what to do.
    """
    problem = (
        None
        if local
        else next(_problems_of_evaluation(module, "validation_step", "test_step", "predict_step"), None)
    )
    if problem is None:
        problem = without_initial_values(module, known)
    if problem is not None:
        raise PiperError(f"PiperStrategy: {problem}")


def checked_timeout(timeout: object) -> timedelta:
    """Return the strategy's argument `timeout` as a `timedelta`. Numbers count seconds.

    Raises:
        PiperError: The argument is not a positive time.
    """
    if isinstance(timeout, int | float) and is_number(timeout, positive=True):
        with contextlib.suppress(OverflowError):
            timeout = timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise PiperError(
            f"PiperStrategy(timeout={shown(timeout)}) is not usable. Give a positive datetime.timedelta, or a positive "
            "number of seconds [PIPER-S001]"
        )
    return timeout


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that the optimizers of a fit have not been distributed by an earlier fit.

    Raises:
        PiperError: An optimizer still has only a part of the parameters.
    """
    for optimizer in optimizers:
        if optimizer in restricted:
            raise PiperError(
                f"PiperStrategy: this {type(optimizer).__name__} was used in an earlier fit, and has only the part of the "
                "parameters that this process had. In configure_optimizers, create a new optimizer for each fit"
                " [PIPER-S004]"
            )


def uncapturable(
    module: pl.LightningModule, optimizers: list[torch.optim.Optimizer], processes: int, capture: str
) -> str | None:
    """Return why a module's training step cannot be captured, if this is known before the first batch. None if a
    capture may succeed.

    Args:
        optimizers: The Trainer's optimizers.
        processes: Number of processes of the run.
        capture: The strategy's argument `capture`. With "never", the result is never None.
    """
    if not module.automatic_optimization:
        return (
            "manual optimization (automatic_optimization=False), because a captured training step is one "
            "forward and one backward pass. Return the loss, and leave backward and optimizer steps to the "
            "Trainer"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return (
            "training_step(dataloader_iter), which draws its own batches, so Piper has no batch to capture. "
            "Take (batch, batch_idx)"
        )
    if len(optimizers) != 1:
        return (
            f"{len(optimizers)} optimizers from configure_optimizers. Return one optimizer, with a parameter "
            "group for each part of the module that needs its own settings"
        )
    own = {id(x) for x in module.parameters()}
    if not any(id(x) in own for group in optimizers[0].param_groups for x in group["params"]):
        return (
            "an optimizer over none of the module's parameters. Give it parameters of the module, which a "
            "captured step trains"
        )
    if processes > 1 and isinstance(optimizers[0], torch.optim.LBFGS):
        return (
            "LBFGS over several processes, because its update needs all parameters in one process. Use an optimizer "
            "that updates each parameter independently, such as SGD or AdamW"
        )
    return next(_uncapturable_callbacks(module.trainer), "capture='never'" if capture == "never" else None)


def _uncapturable_callbacks(trainer: pl.Trainer) -> Iterator[str]:
    """Yield a text for each callback that prevents a capture. The text says why, and what to do instead."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        swa = is_a(callback, StochasticWeightAveraging) and trainer.max_epochs != -1
        if swa and callback.pl_module_contains_batch_norm(trainer.lightning_module):
            yield (
                f"{type(callback).__name__} of a module with batch norms, because after the last epoch it "
                "recomputes their statistics as means over all batches (momentum=None), which reads the "
                "number of batches from a tensor. Use EMAWeightAveraging, which averages the statistics, or "
                "another norm"
            )
        if is_a(callback, BackboneFinetuning) and _is_reached(callback.unfreeze_backbone_at_epoch, trainer):
            yield (
                "BackboneFinetuning, which unfreezes parameters at epoch "
                f"{callback.unfreeze_backbone_at_epoch}, because a captured step would not follow. Freeze "
                "them yourself (requires_grad_(False)), call fit up to that epoch, unfreeze them, and call "
                "fit again"
            )


def needs_replicas(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return why every process needs all parameters of the module, as under DDP; None without such a reason.

    The reason is a callback or a gradient hook. If there is a reason, Piper does not search for a program.
    """
    found = next((x for x in trainer.callbacks if is_a(x, BaseFinetuning, ModelPruning)), None)  # type: ignore[attr-defined]
    if found is None:
        hooked = next((name for name, x in module.named_parameters() if has_gradient_hooks(x)), None)
        return (
            None
            if hooked is None
            else (f"a hook on the gradient of {hooked!r} needs the whole gradient in each process")
        )
    return (
        f"the callback {type(found).__name__} may change parameters after the first batch, and needs whole "
        "parameters in each process"
    )


def check_optimizer_stays(optimizer: Optimizer, now: Sequence[Optimizer]) -> None:
    """Check that the Trainer still has the optimizer of the first batch, which Piper has restricted to the
    parts of the parameters that the process holds.

    Args:
        optimizer: The optimizer of the first batch.
        now: The Trainer's optimizers.

    Raises:
        PiperError: A hook has replaced the optimizer, or the Trainer has more or fewer optimizers.
    """
    if len(now) != 1 or now[0] is not optimizer:
        raise PiperError(
            "PiperStrategy: a callback or hook replaced strategy.optimizers after the first batch. Each "
            f"process holds only a part of the parameters, and only the {type(optimizer).__name__} of the "
            "first batch works on these parts. Replace strategy.optimizers in on_train_start or earlier, or "
            "change the settings in the param_groups of trainer.optimizers [PIPER-S005]"
        )


def check_runs_once(fresh: bool) -> None:
    """Check that the optimizer does not run the step twice on one batch while each process has only some of
    the parameters.

    Optimizers that run it twice (LBFGS, SAM) move the parameters between the runs, by a measure over all
    parameters.

    Args:
        fresh: Whether the step has not run on the current batch yet.

    Raises:
        PiperError: The step has run on the current batch before.
    """
    if not fresh:
        raise PiperError(
            "PiperStrategy: the optimizer, or the module's optimizer_step, ran the closure twice on one batch, but this "
            "process has only some of the parameters. Use an optimizer that runs the closure once, such as SGD or AdamW, "
            "and pass the closure only to optimizer.step [PIPER-S004]"
        )


# Hooks that may change gradients, parameters, or the optimizer's settings and states, between the plan, which
# `training_step` runs, and the update.
_AFTER_PLAN = (
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)


def check_overlap(
    module: pl.LightningModule,
    optimizer: ShardedOptimizer,
    plugin: Any,
    accumulate: str,
    hosted: bool,
    device: torch.device,
) -> None:
    """Check that the updates of a program with `overlap_update` depend only on gradients and states of their own
    parameters, and that nothing changes these gradients after the backward pass.

    Args:
        module: The module, with its Trainer.
        optimizer: The optimizer of the fit.
        plugin: The Trainer's precision plugin.
        accumulate: The strategy's argument `accumulate`.
        hosted: Whether the program keeps states of the optimizer in host memory.
        device: The device that updates the parameters.

    Raises:
        PiperError: An update must wait for the whole backward pass.
    """
    problem = next(_problems_of_overlap(module, plugin, accumulate, hosted), None)
    if problem is None and not goes_in_parts(optimizer.optimizer, optimizer.of_groups(), device, early=True):
        problem = (
            f"a test did not show that {type(optimizer.optimizer).__name__} computes the same numbers, and counts the same "
            "steps, if it updates one parameter after another"
        )
    if problem is not None:
        raise PiperError(
            f"PiperStrategy: overlap_update computes updates during the backward pass, but {problem}. Set "
            "overlap_update=False, or remove the cause [PIPER-S014]"
        )


def _problems_of_overlap(
    module: pl.LightningModule, plugin: Any, accumulate: str, hosted: bool
) -> Iterator[str]:
    """Yield each reason why updates must wait for the whole backward pass."""
    trainer: Any = module.trainer
    if trainer.gradient_clip_val:
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val} changes gradients after the backward pass, by a norm of all "
            "of them"
        )
    if getattr(plugin, "scaler", None) is not None:
        yield "the loss scale of precision '16-mixed' is divided out after the backward pass, or the step is skipped"
    if accumulate == "tokens":
        yield "accumulate='tokens' weights the gradients after the last backward pass"
    if hosted:
        yield "the program keeps states of the optimizer in host memory between the steps"
    for owner in (module, *trainer.callbacks):
        for name in _AFTER_PLAN:
            hook = getattr(owner, name, None)
            if hook is not None and not is_default(hook):
                yield f"{type(owner).__name__}.{name} may change gradients, parameters or settings before the update"
    for name, p in module.named_parameters():
        if has_gradient_hooks(p):
            yield f"a hook on the gradient of {name!r} may change it"


def checked_backend(given: str | None, device: torch.device, processes: int) -> str:
    """Return the backend of the default process group: the given backend, or the device's default backend.

    Args:
        given: The user's backend; None to choose one.
        device: Device of this process.
        processes: Number of processes of the run; a single one does not communicate.

    Raises:
        PiperError: The processes cannot exchange tensors with the given backend, or the device has no
            backend.
    """
    if device.type == "cpu" or processes == 1:
        return given or torch.distributed.Backend.default_device_backend_map.get(device.type, HOST)
    own = backend_of(device)
    if given is not None and own not in given:
        raise PiperError(
            f"PiperStrategy(process_group_backend={given!r}): processes with {device.type} devices exchange "
            f"tensors by {own}. Leave process_group_backend out, or use {own!r} or 'cpu:{HOST},{device.type}:{own}'. "
            "To run several logical devices on one device, use transport='local' [PIPER-S001]"
        )
    return given or own


def checked_capture(transport: str, capture: str, compile: object) -> str:
    """Return the effective value of the argument `capture`: "always" on a simulated accelerator, otherwise
    the argument itself.

    Raises:
        PiperError: An argument asks for code outside of the simulated accelerator.
    """
    if transport != "simulated":
        return capture
    if capture == "never":
        raise PiperError(
            "PiperStrategy(transport='simulated', capture='never'): the simulated accelerator runs only "
            "captured steps. Leave capture out [PIPER-S001]"
        )
    if compile:
        raise PiperError(
            "PiperStrategy(transport='simulated', compile=...): compiled passes bypass the simulated "
            "accelerator, which runs single operations. Leave compile out [PIPER-S001]"
        )
    return "always"


def checked_graphs(cuda_graphs: object) -> bool:
    """Return the argument `cuda_graphs`.

    Raises:
        PiperError: It is neither True nor False.
    """
    if not isinstance(cuda_graphs, bool):
        raise PiperError(
            f"PiperStrategy(cuda_graphs={shown(cuda_graphs)}) is not usable. Give True or False [PIPER-S001]"
        )
    return cuda_graphs


def check_choices(**arguments: object) -> None:
    """Check that each of these arguments of the strategy has one of the values in `CHOICES`.

    Raises:
        PiperError: The value of an argument is not accepted. The error names the accepted values.
    """
    for name, value in arguments.items():
        accepted = CHOICES[name]
        if not isinstance(value, str) or value not in accepted:
            raise PiperError(
                f"PiperStrategy({name}={shown(value)}) is not usable. Give one of {', '.join(map(repr, accepted))}"
                " [PIPER-S001]"
            )


def check_local_sgd(
    local_sgd: object, directives: object, transport: str, checkpoint: str, capture: str
) -> None:
    """Check that the strategy's argument `local_sgd` is valid, and that the other arguments fit to it.

    Raises:
        PiperError: The argument is not a `LocalSGD`, or another argument does not fit to local SGD.
    """
    if local_sgd is None:
        return
    if not isinstance(local_sgd, LocalSGD):
        raise PiperError(
            f"PiperStrategy(local_sgd={shown(local_sgd)}) is not usable. Give "
            "piper.LocalSGD(replicas=..., every=...) [PIPER-S001]"
        )
    for name, value, unusable, why in (
        (
            "directives",
            directives,
            "auto",
            "a search chooses only programs with the result of one device",
        ),
        ("transport", transport, "local", "one process cannot have different parameters for each replica"),
        (
            "transport",
            transport,
            "simulated",
            "one process cannot have different parameters for each replica",
        ),
        ("checkpoint", checkpoint, "sharded", "its checkpoints are one file with the states of all replicas"),
        ("capture", capture, "never", "it trains only captured steps"),
    ):
        if isinstance(value, str) and value == unusable:
            raise PiperError(
                f"PiperStrategy(local_sgd=..., {name}={value!r}): local SGD does not support {name}={value!r}, "
                f"because {why}. Remove {name}={value!r}, or local_sgd [PIPER-S001]"
            )


def check_local_fit(trainer: pl.Trainer, plugin: Precision, searched: bool) -> None:
    """Check that local SGD supports everything that a fit uses.

    Args:
        trainer: The Trainer.
        plugin: Its precision plugin.
        searched: Whether a search must find the program.

    Raises:
        PiperError: Something is unsupported.
    """
    where = "PiperStrategy(local_sgd=...)"
    if searched:
        raise PiperError(
            f"{where}: the module or PIPER_DIRECTIVES asks for a search, which chooses only programs with the result of "
            "one device. Give the directives or degrees of one replica [PIPER-S002]"
        )
    if getattr(plugin, "scaler", None) is not None:
        raise PiperError(
            f"{where} with precision {plugin.precision!r}: a replica whose gradients overflow would skip an update "
            "alone. Use 'bf16-mixed' or '32-true' [PIPER-S002]"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_a(callback, WeightAveraging, StochasticWeightAveraging):
            raise PiperError(
                f"{where}: {type(callback).__name__} would average the parameters of each replica separately, but "
                "replicas exchange them. Remove the callback [PIPER-S002]"
            )


def check_start_method(start_method: object) -> None:
    """Check that the strategy's argument `start_method` is "popen".

    Raises:
        PiperError: The argument has a value that is not accepted, such as "spawn" or "fork".
    """
    if not isinstance(start_method, str) or start_method != "popen":
        raise PiperError(
            f"PiperStrategy(start_method={shown(start_method)}): Piper supports only 'popen' (the "
            "script runs once for each device), because a spawned or forked worker cannot return a sharded "
            "module. Leave start_method out. In a notebook, also give transport='local' [PIPER-S001]"
        )
