"""Optimizer states that wait in the memory of the host between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_piper.holdings.optimizer import ShardedOptimizer


class HostStates:
    """The states of some parameters: on the device while the optimizer updates them, else on the host.

    A step's closure runs forward and backward passes: states come to the device when it has returned, and are copied back behind
    the update. Room on the host is kept, pinned where copies are asynchronous. States that a checkpoint brings stay on the device
    up to the next step.

    Args:
        optimizer: cut down to what this process holds.
        names: of the parameters.
        device: that updates them.
    """

    def __init__(self, optimizer: ShardedOptimizer, names: Collection[str], device: torch.device) -> None:
        self._optimizer, self._names, self._device = optimizer, frozenset(names), device
        self._pinned = device.type != "cpu"
        self._room: dict[tuple[Tensor, str], Tensor] = {}
        optimizer.optimizer.register_step_pre_hook(self._before)
        optimizer.optimizer.register_step_post_hook(self._after)

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return sum(room.nbytes for room in self._room.values())

    def _states(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Parameter, key and tensor; numbers, such as counts of steps, stay where they are."""
        for _, name, p in self._optimizer.held():
            if name in self._names:
                for key, value in self._optimizer.optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        yield p, key, value

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args and callable(args[0]):
            return (self._bringing(args[0]), *args[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._bringing(kwargs["closure"])}
        self._bring()
        return args, kwargs

    def _bringing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self._bring()
            return loss

        return run

    def _bring(self) -> None:
        for p, key, value in list(self._states()):
            if self._room.get((p, key)) is value:
                self._optimizer.optimizer.state[p][key] = torch.empty_like(value, device=self._device).copy_(
                    value, non_blocking=self._pinned
                )

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for p, key, value in list(self._states()):
            room = self._room.get((p, key))
            if room is None or room.shape != value.shape or room.dtype != value.dtype:
                room = self._room[p, key] = torch.empty_like(value, device="cpu", pin_memory=self._pinned)
            if room is not value:
                self._optimizer.optimizer.state[p][key] = room.copy_(value, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.current_stream(self._device).synchronize()  # whoever reads a state finds it whole
