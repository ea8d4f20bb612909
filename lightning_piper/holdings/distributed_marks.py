"""Marks of modules and optimizers that are distributed over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import Known, places_of, tensor_at

if TYPE_CHECKING:
    from lightning_piper.holdings.ownership import Ownership

PARTS = "_piper_parts"  # attribute of a distributed module: its `Ownership`
# Attribute of a module on the meta device that did not receive a checkpoint's values.
UNREAD = "_piper_unread"
# Optimizers that have only this process's part of the parameters, from the beginning of a fit on.
restricted: WeakSet[Optimizer] = WeakSet()


def parts_of(module: nn.Module) -> Ownership | None:
    """Return the distribution of a module's tensors over processes; None if the module is not distributed."""
    found: Ownership | None = module.__dict__.get(PARTS)
    return found


def put_together(module: nn.Module, known: Known) -> None:
    """If the module is still distributed from an earlier run, give every process the whole module before a
    new run, and remove the marks of the earlier run. Collective.

    Args:
        module: The module.
        known: Values from a checkpoint. If they include all tensors without values, the tensors stay where
            they lie, because the checkpoint gives them values.

    Raises:
        PiperError: The earlier run failed, or it had no step and so did not read a checkpoint's values.
    """
    missing = [n for n, at in places_of(module).items() if tensor_at(at).is_meta and n not in known]
    if missing and module.__dict__.get(UNREAD):
        raise PiperError(
            f"PiperStrategy: {missing[0]!r} is on the meta device without values, because "
            "the previous run had no step and so did not load its checkpoint. Pass ckpt_path to this run as "
            "well [PIPER-S009]"
        )
    module.__dict__.pop(UNREAD, None)
    parts = module.__dict__.pop(PARTS, None)
    if parts is None or not missing:
        return
    if not parts.ended:
        raise PiperError(
            "PiperStrategy: the previous run failed and left the module incomplete in this process: "
            f"{missing[0]!r} has no values. Create a new module and load a checkpoint [PIPER-S010]"
        )
    parts.restore()
