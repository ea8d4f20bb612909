"""`on_train_batch_start` of a module may return -1, so that its process skips the rest of the epoch."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

import lightning.pytorch as pl

from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.strategy import _lightning


def check_skips(module: pl.LightningModule, world: World, batch_idx: int) -> None:
    """Check that all processes skip the rest of the epoch, or none of them. A process that skips it alone would leave
    the other processes waiting in their next step. Collective.

    Raises:
        PiperError: Some processes skip the rest of the epoch.
    """
    skips = _lightning.skips_epoch()
    if not world.decide(skips, all=False):
        return
    by_rank = world.gather(skips)
    if not all(by_rank):
        raise PiperError(
            f"{type(module).__name__}.on_train_batch_start returned -1 on rank {by_rank.index(True)} at batch {batch_idx}, "
            f"but not on rank {by_rank.index(False)}, which would wait for it in the step. Let all ranks decide together: "
            "skip = self.trainer.strategy.reduce_boolean_decision(skip, all=False). Return -1 if skip is true [PIPER-L003]"
        )


def returns_only_none(function: Callable[..., Any]) -> bool:
    """Return whether a function's bytecode shows that it can return only None."""
    code = getattr(function, "__code__", None)
    return code is not None and _returns_only_none(code)


@cache
def _returns_only_none(code: CodeType) -> bool:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    for before, each in pairwise(dis.get_instructions(code)):
        if each.opname == "RETURN_CONST" and each.argval is not None:
            return False
        is_none = before.opname == "LOAD_CONST" and before.argval is None and not each.is_jump_target
        if each.opname == "RETURN_VALUE" and not is_none:
            return False
    return True
