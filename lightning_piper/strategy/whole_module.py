"""`whole_module`: a hook that runs the module has the whole module in every process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_piper.common.lightning_packages import is_a
from lightning_piper.common.tensor_versions import sum_of_bits, tensor_versions
from lightning_piper.common.user_lines import user_frame
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.processes.background import MEETING
from lightning_piper.session.available_memory import lacks_memory
from lightning_piper.strategy import _lightning

NAME = "piper.whole_module"


@contextlib.contextmanager
def whole_module(module: pl.LightningModule) -> Iterator[None]:
    """Give every process the whole module inside of a `with` block, so that a hook can run the module.

        def on_validation_epoch_end(self):
            with piper.whole_module(self):
                texts = self.model.generate(self.prompts)

    Collective: call it on all processes. Inside of the block, processes need not do the same work, and one
    process alone may run the module. At the end of the block, each parameter must have the value that it had at the
    start. If every process has the whole module already, or with another strategy, this changes nothing.

    Args:
        module: The Trainer's LightningModule.

    Raises:
        PiperError: The module is not the Trainer's LightningModule. Or a process did not call it. Or a process
            does not have memory for the whole module. Or the block changed a parameter or its gradient. Or the module has no
            values, because it is on the meta device before the first batch.
    """
    parts, where = parts_of(module), f"{NAME} at {user_frame()}"
    if not _is_whole_run(module):
        raise PiperError(
            f"{where}: {type(module).__name__} is not the LightningModule that the Trainer runs. Give the whole "
            "LightningModule, and use its submodule inside of the block [PIPER-S007]"
        )
    if parts is None and any(x.is_meta for x in module.parameters()):
        raise PiperError(
            f"{where}: the module is on the meta device and has no values before the first step of a run. Call it "
            "after the first step [PIPER-S009]"
        )
    if parts is None or parts.whole:
        yield
        return
    strategy: Any = module.trainer.strategy
    MEETING[threading.get_ident()] = where
    try:
        calls = strategy.world.gather(NAME)
    finally:
        del MEETING[threading.get_ident()]
    if any(call != NAME for call in calls):
        raise PiperError(
            f"{where}: not all processes have called it, but each process has a part of the module. Call it on all "
            "ranks, and write `if self.global_rank == 0` inside of the with block [PIPER-S007]"
        )
    if (lacking := lacks_memory(module, strategy.world)) is not None:
        raise PiperError(
            f"{where}: {lacking}. Move the code of the block to validation_step or test_step: if Piper can capture "
            "the step, no process needs the whole module. Or use processes with more memory [PIPER-S007]"
        )
    with contextlib.ExitStack() as whole:
        with torch.inference_mode(False):
            whole.enter_context(parts.whole_everywhere())
        before, gradients = _sums(module), _gradients(module)
        yield
        if made := [name for name, mark in _gradients(module).items() if gradients.get(name) != mark]:
            raise PiperError(
                f"{where}: the gradient of {made[0]!r} was changed in the block, but other processes would not get the "
                "change. Change gradients outside of the block. Compute gradients in the block only with "
                "torch.autograd.grad [PIPER-S007]"
            )
        if changed := [name for name, total in _sums(module).items() if before.get(name) != total]:
            raise PiperError(
                f"{where}: {changed[0]!r} was changed in the block, but other processes would not get the new "
                "values. Change parameters outside of the block, in the param_groups of trainer.optimizers"
                " [PIPER-S007]"
            )


def _is_whole_run(module: nn.Module) -> bool:
    """Return whether a module is a LightningModule, and is not a submodule of the Trainer's LightningModule."""
    if not is_a(module, pl.LightningModule):
        return False
    trainer = _lightning.trainer_of(module)
    return trainer is None or trainer.lightning_module is None or trainer.lightning_module is module


def _sums(module: pl.LightningModule) -> dict[str, int]:
    """Return `sum_of_bits` of each parameter that has values, by name."""
    return {name: sum_of_bits(x) for name, x in module.named_parameters() if x.layout == torch.strided}


def _gradients(module: pl.LightningModule) -> dict[str, tuple[int, int]]:
    """Return the id and the version of each parameter's gradient, by name of the parameter."""
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    return {name: (id(x), version) for name, x, version in tensor_versions(gradients)}
