"""What the executor asks of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_piper.plan.instructions import AllGather, AllToAll, Post, Reduce, ReduceScatter, Retire, Send, Wait
from lightning_piper.plan.plan import Plan


class Blocked:
    """The type of `BLOCKED`."""


BLOCKED = Blocked()  # returned by a bound instruction that must be tried again when other devices have gone on

Bundle = tuple[torch.Tensor, ...]
Slots = list[Any]  # of bundles; a slot without value is None, a pending one belongs to the transport
Bound = Callable[[], object]  # an instruction with everything it needs


class Endpoint(Protocol):
    """One device's side of a transport for one plan. Each method binds an instruction; None if there is nothing to do."""

    hands_over: bool  # received tensors may be the sender's own

    def send(self, instruction: Send, slots: Slots) -> Bound | None: ...

    def retire(self, instruction: Retire) -> Bound | None: ...

    def post(self, instruction: Post, slots: Slots) -> Bound | None: ...

    def reduce(self, instruction: Reduce, slots: Slots) -> Bound | None: ...

    def reduce_scatter(self, instruction: ReduceScatter, slots: Slots) -> Bound | None: ...

    def all_gather(self, instruction: AllGather, slots: Slots, own: torch.Tensor) -> Bound | None:
        """`own`: what the device keeps of the bucket, the whole flat tensor or its shard."""
        ...

    def all_to_all(self, instruction: AllToAll, slots: Slots) -> Bound | None: ...

    def wait(self, instruction: Wait, slots: Slots) -> Bound | None: ...

    def reset(self) -> None:
        """Forget what a step that failed has left behind."""
        ...


class Transport(Protocol):
    """Moves bundles between devices."""

    def endpoint(self, plan: Plan, device: torch.device) -> Endpoint:
        """The side of the plan's device, whose tensors are on `device`."""
        ...
