"""The interface between the executor and a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_piper.ops.base import Bound, Bundle, Endpoint, Slots
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.piggyback import Piggyback

__all__ = ["BLOCKED", "Bound", "Bundle", "Endpoint", "RidingEndpoint", "Slots", "Transport"]


class Blocked:
    """The type of `BLOCKED`."""


# A bound instruction returns this value if it must run again after other devices have advanced.
BLOCKED = Blocked()


class RidingEndpoint(Endpoint, Protocol):
    """An endpoint that can carry a small sum in the message of a larger sum.

    Attributes:
        piggyback: The small sums in the steps of the plan; None if the plan does not allow them.
    """

    piggyback: Piggyback | None

    def vote_abort(self) -> None:
        """Take part in a step that this device cannot run but other devices may run. Call it only if
        `piggyback` is not None."""
        ...


class Transport(Protocol):
    """A transport that moves bundles between devices."""

    def endpoint(self, plan: Plan, device: torch.device) -> RidingEndpoint:
        """Return the endpoint of the plan's device, whose tensors are on `device`."""
        ...
