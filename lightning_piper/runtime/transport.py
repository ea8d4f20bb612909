"""What the executor asks of a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_piper.ops.base import Bound, Bundle, Endpoint, Slots
from lightning_piper.plan.plan import Plan

__all__ = ["BLOCKED", "Bound", "Bundle", "Endpoint", "Slots", "Transport"]


class Blocked:
    """The type of `BLOCKED`."""


BLOCKED = Blocked()  # returned by a bound instruction that must be tried again when other devices have gone on


class Transport(Protocol):
    """Moves bundles between devices."""

    def endpoint(self, plan: Plan, device: torch.device) -> Endpoint:
        """The side of the plan's device, whose tensors are on `device`."""
        ...
