"""Runs a step again, operation by operation, to find the first operation that made a NaN or an infinity."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import user_line
from lightning_piper.ir.regions import Step
from lightning_piper.ops.instruction import Instruction
from lightning_piper.processes.world import World
from lightning_piper.runtime import StepResult
from lightning_piper.runtime.watching import See, tensors_in
from lightning_piper.session.process_runtime import Prepared, ProcessRuntime

Found = tuple[int, int, str]  # how certain the cause is (0: most), position in the step, text


@dataclass(frozen=True)
class LastStep:
    """The captured step that runs now or ran last, which can run again.

    Attributes:
        runtime: The runtime on which it ran.
        prepared: Its program.
        leaves, seed, scale: The arguments with which it ran (`ProcessRuntime.run`).
        running: Returns the context in which to run the step.
    """

    runtime: ProcessRuntime
    prepared: Prepared
    leaves: Sequence[torch.Tensor]
    seed: int
    scale: float
    running: Callable[[Step], contextlib.AbstractContextManager[None]]

    def run(self, sums: bool, digest: int) -> StepResult:
        """Run the step as planned. `sums` and `digest` are `last` and `digest` of `ProcessRuntime.run`.
        Collective."""
        with self.running(self.prepared.compiled.step):
            return self.runtime.run(self.prepared, self.leaves, self.seed, self.scale, sums, digest)

    @contextlib.contextmanager
    def again(self, see: See) -> Iterator[StepResult]:
        """Run the step again, operation by operation. Buffers get their values back at the end of the context.
        Collective."""
        with (
            self.running(self.prepared.compiled.step),
            self.runtime.run_watched(self.prepared, see, self.leaves, self.seed, self.scale) as result,
        ):
            yield result

    def first_nonfinite(self, tensors: Mapping[str, torch.Tensor], world: World) -> str | None:
        """Return a text about the first NaN or infinity of the step; None if the step makes neither. If its
        loss was NaN or infinite, first give buffers their values from before the step. Collective.

        A NaN in the batch, a parameter or a buffer comes first. Then comes the first operation that makes a
        NaN and reads none. Last comes the first operation that makes an infinity from finite values.
        Infinities that the step writes as constants, such as in masks, do not count.

        Args:
            tensors: This process's parameters and buffers by name.
        """
        for executor in self.prepared.executors:
            executor.restore_buffers()
        given = [(f"tensor {i} of the batch", x) for i, x in enumerate(self.leaves)]
        found = nan_in(given, tensors, world)
        causes, order = NonFinite(), order_of(self.prepared)

        def see(at: Instruction, node: Node, inputs: Sequence[torch.Tensor], value: Any) -> None:
            constants = (node.args, dict(node.kwargs))
            causes.see(
                str(node.target), inputs, value, constants, order[at.node], partial(described, at, node)
            )

        with self.again(see):
            everyones = [each for own in world.gather([*found, *causes.found]) for each in own]
        return min(everyones)[2] if everyones else None


class NonFinite:
    """Finds the first operation that makes a NaN, and the first that makes an infinity.

    Attributes:
        found: The causes so far.
    """

    def __init__(self) -> None:
        self._infinite: str | None = None  # the operation that made the first infinity
        self.found: list[Found] = []

    def see(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        value: Any,
        constants: Any,
        order: int,
        described: Callable[[], str],
    ) -> None:
        """Look at an operation.

        Args:
            name: Its name.
            inputs, value: The tensors that the operation read, and its result.
            constants: Its arguments, which may have numbers.
            order: Its position in the step.
            described: Returns its text.
        """
        if (self.found and self.found[0][0] == 1) or "empty" in name:
            return
        made = tensors_in(value)
        if any(map(has_nan, made)):
            if not any(map(has_nan, inputs)):
                why = ""
                if any(map(has_infinity, inputs)):
                    why = f" from the infinity of {self._infinite or 'its input'}"
                self.found = [(1, order, f"{described()} makes a NaN{why}")]
        elif (
            self._infinite is None
            and any(map(has_infinity, made))
            and not any(map(has_infinity, inputs))
            and all(math.isfinite(x) for x in _torch.tree_leaves(constants) if isinstance(x, float))
        ):
            self._infinite = described()
            self.found = [(2, order, f"{self._infinite} makes an infinity")]


class WatchedUncaptured(_torch.TorchDispatchMode):
    """A mode that shows every operation of an uncaptured step to `see`, with the arguments of `NonFinite.see`."""

    def __init__(self, see: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see, self._order = see, 0
        self._backward = False  # the backward pass has no lines of the user's code

    def run(
        self, step: Callable[[], Any], params: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """Run a step, forward and backward.

        Returns:
            The loss, and the gradient of each parameter: None if the loss does not depend on it. If the step
                returns no loss, or one without gradients, None and an empty list.
        """
        with torch.enable_grad(), self:
            result = step()
            loss = result["loss"] if isinstance(result, Mapping) else result
            if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
                return None, []
            self._backward = True
            return loss, torch.autograd.grad(loss, params, allow_unused=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        name, backward = str(func).removeprefix("aten::").removesuffix(".default"), self._backward

        def text() -> str:
            return f"{name} in the backward pass" if backward else f"{name} ({user_line()})"

        self._see(name, tensors_in((args, kwargs)), value, (args, kwargs), self._order, text)
        self._order += 1
        return value


def nan_in(
    batch: Sequence[tuple[str, torch.Tensor]], tensors: Mapping[str, torch.Tensor], world: World
) -> list[Found]:
    """Return the tensors of a batch, and the parameters and buffers, that have a NaN before a step."""
    on = f" on rank {world.rank}" if world.size > 1 else ""
    found: list[Found] = []
    for what, x in [*batch, *((f"{name!r}", x) for name, x in tensors.items())]:
        if has_nan(x):
            first = x.isnan().nonzero()[0].tolist()
            found.append((0, len(found), f"{what} has a NaN at {first} before the step{on}"))
    return found


def has_nan(x: torch.Tensor) -> bool:
    return _can_be_infinite(x) and bool(x.isnan().any())


def has_infinity(x: torch.Tensor) -> bool:
    return _can_be_infinite(x) and bool(x.isinf().any())


def _can_be_infinite(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and (x.is_floating_point() or x.is_complex())


def described(at: Instruction, node: Node) -> str:
    """Return an operation with its pass and the user's line, as messages show it."""
    return f"{str(node.target).removesuffix('.default')} in {at.label} ({own_line(node)})"


def order_of(prepared: Prepared) -> dict[int, int]:
    return {node.id: i for i, node in enumerate(prepared.compiled.plans.order)}
