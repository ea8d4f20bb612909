"""What the executor asks of a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_piper.ops.base import Bound, Bundle, Endpoint, Slots
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.riding import Ride

__all__ = ["BLOCKED", "Bound", "Bundle", "Endpoint", "RidingEndpoint", "Slots", "Transport"]


class Blocked:
    """The type of `BLOCKED`."""


BLOCKED = Blocked()  # returned by a bound instruction that must be tried again when other devices have gone on


class RidingEndpoint(Endpoint, Protocol):
    """Attributes:
    ride: what rides in the steps of the plan, if anything does.
    """

    ride: Ride | None

    def stand_in(self) -> None:
        """Take part in a step that others may run, and this device does not. Only where something rides."""
        ...


class Transport(Protocol):
    """Moves bundles between devices."""

    def endpoint(self, plan: Plan, device: torch.device) -> RidingEndpoint:
        """The side of the plan's device, whose tensors are on `device`."""
        ...
