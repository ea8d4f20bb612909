"""`whole_module`: a hook that runs the module has the whole module in every process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_piper.common.tensor_versions import changed_tensors, tensor_versions
from lightning_piper.common.user_lines import user_frame
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.processes.background import MEETING
from lightning_piper.session.available_memory import lacks_memory

NAME = "piper.whole_module"


@contextlib.contextmanager
def whole_module(module: pl.LightningModule) -> Iterator[None]:
    """Give every process the whole module inside of a `with` block, so that a hook can run the module.

        def on_validation_epoch_end(self):
            with piper.whole_module(self):
                texts = self.model.generate(self.prompts)

    Collective: call it on all processes. Inside of the block, processes need not do the same work, and one
    process alone may run the module. The block reads parameters. It must not change them. If every process has
    the whole module already, or with another strategy, this changes nothing.

    Args:
        module: The Trainer's LightningModule.

    Raises:
        PiperError: A process did not call it. Or a process does not have memory for the whole module. Or the
            block changed a parameter. Or the module has no values, because it is on the meta device before the
            first batch.
    """
    parts, where = parts_of(module), f"{NAME} at {user_frame()}"
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
            "ranks, and ask for the rank inside of the block [PIPER-S007]"
        )
    if (lacking := lacks_memory(module, strategy.world)) is not None:
        raise PiperError(
            f"{where}: {lacking}. Move the code of the block to validation_step or test_step: if Piper can capture "
            "the step, no process needs the whole module. Or use processes with more memory [PIPER-S007]"
        )
    with contextlib.ExitStack() as whole:
        with torch.inference_mode(False):
            whole.enter_context(parts.whole_everywhere())
        versions = tensor_versions(dict(module.named_parameters()))
        yield
        if changed := changed_tensors(versions):
            raise PiperError(
                f"{where}: {changed[0]!r} was changed in the block, but other processes would not get the new "
                "values. Change parameters outside of the block, in the param_groups of trainer.optimizers"
                " [PIPER-S007]"
            )
