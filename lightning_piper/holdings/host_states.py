"""Optimizer states that stay in host memory between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_piper.capture.torch_private._torch import register_first_post_hook
from lightning_piper.holdings.elementwise import goes_in_parts
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.optimizer_slices import after_closure, only, own_step

PART = 32 * 2**20  # bytes of parameters whose states are on the device at once


class HostStates:
    """A mover of the optimizer states of some parameters: a state is on the device while the optimizer
    updates its parameter, otherwise on the host. The constructor adds hooks to the optimizer and wraps its
    `step`.

    Parameters are updated part by part, in their order. For each part, this class copies the states to the
    device, runs the optimizer, and copies the states back. If the optimizer would compute different numbers
    in parts (`goes_in_parts`), all parameters are one part. A step's closure runs forward and backward
    passes, so states are copied to the device after the closure returns.

    The user's call of `step`, with its hooks, updates the last part. `step` of the optimizer's class updates
    the earlier parts. Host memory is kept between steps, and is pinned if copies are asynchronous. States
    from a checkpoint stay on the device until the next step.

    Args:
        optimizer: The sharded optimizer.
        names: Names of the parameters with states on the host.
        device: The device that updates the parameters.
    """

    def __init__(self, optimizer: ShardedOptimizer, names: Collection[str], device: torch.device) -> None:
        self._optimizer, self._names, self._device = optimizer, frozenset(names), device
        self._pinned = device.type != "cpu"
        self._room: dict[tuple[Tensor, str], Tensor] = {}  # (parameter, key of its state) -> host memory
        self._part: list[Tensor] = []  # hosted parameters of the part that is being updated
        self._rest = ExitStack()  # closing it restores the full groups
        own = optimizer.optimizer
        # whether parameters are updated in several parts
        self._apart = len(list(self._parts())) > 1 and goes_in_parts(own, optimizer.of_groups(), device)
        own.register_step_pre_hook(self._before)
        # `_after` runs before all other hooks, so the other hooks see all parameters in the groups.
        register_first_post_hook(own, self._after)
        # `step` must be a bound method, because schedulers that are made later (SWALR) expect one.
        own.step = MethodType(self._wrapped_step(own.step), own)  # type: ignore[method-assign]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(room.nbytes for room in self._room.values())

    def _parts(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield the parameters of each part, and among them the parameters with states on the host.

        In a part, the parameters with states on the host have at most `PART` bytes, unless there is only one.
        """
        params: list[Tensor] = []
        hosted: list[Tensor] = []
        for _, name, p in self._optimizer.held():
            if name in self._names and sum(x.nbytes for x in hosted) + p.nbytes > PART and hosted:
                yield params, hosted
                params, hosted = [], []
            params.append(p)
            hosted += [p] if name in self._names else []
        yield params, hosted

    def _states(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield parameter, key and state tensor of the current part. Skip numbers, such as step counts, which
        stay where the optimizer has them, because they take little memory."""
        for p in self._part:
            for key, value in self._optimizer.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield p, key, value

    def _wrapped_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the optimizer's step, after which the groups have all parameters
        again, even if the step fails."""

        # `wraps` keeps the attribute by which learning rate schedulers recognize a wrapped step.
        @functools.wraps(step)
        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self._rest.close()

        return stepped

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Hook before a step: call `_update` when the gradients are computed. Returns the arguments of the step."""
        return after_closure(args, kwargs, self._update)

    def _update(self) -> None:
        """Update all parts but the last one. Then restrict the optimizer's groups to the last part and copy
        its states to the device, because the step that the user has called updates this part. The gradients
        are already computed."""
        optimizer = self._optimizer.optimizer
        self._rest.close()
        parts = list(self._parts())
        if not self._apart:
            parts = [([p for params, _ in parts for p in params], [p for _, hosted in parts for p in hosted])]
        for params, self._part in parts[:-1]:
            with only(optimizer, params):
                self._bring()
                own_step(optimizer)(optimizer)
                self._store()
        params, self._part = parts[-1]
        self._rest.enter_context(only(optimizer, params))
        self._bring()

    def _bring(self) -> None:
        """Copy the states of the current part that are on the host to the device."""
        for p, key, value in list(self._states()):
            if self._room.get((p, key)) is value:
                self._optimizer.optimizer.state[p][key] = torch.empty_like(value, device=self._device).copy_(
                    value, non_blocking=self._pinned
                )

    def _store(self) -> None:
        """Copy the states of the current part to the host. New states, and states of a new shape or dtype,
        get new host memory."""
        for p, key, value in list(self._states()):
            room = self._room.get((p, key))
            if room is None or room.shape != value.shape or room.dtype != value.dtype:
                room = self._room[p, key] = torch.empty_like(value, device="cpu", pin_memory=self._pinned)
            if room is not value:
                self._optimizer.optimizer.state[p][key] = room.copy_(value, non_blocking=self._pinned)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._store()
        self._rest.close()
        if self._pinned:
            # Wait, because later readers of a state must find its copy complete.
            torch.accelerator.current_stream(self._device).synchronize()
