"""Steps of all devices in one process on a simulated accelerator, each step in a different random order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.ops.base import Bound
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.executor import Executor


class OnSimulated:
    """A simulated accelerator on which executors are created and run.

    One accelerator serves all steps, because gradients that are kept between steps lie in its memory.
    """

    def __init__(self) -> None:
        self._simulated, self._orders = Simulated(0), itertools.count()

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Return a context in which new executors issue their work to the accelerator."""
        with self._simulated.bound():
            yield

    @contextlib.contextmanager
    def step(self, executors: Sequence[Executor]) -> Iterator[None]:
        """Return a context for one step of these executors, in a new random order.

        Raises:
            ExecutionError: An operation does not wait for an operation that it depends on, or uses memory
                that was already reused. The message names the instructions of the plans and their streams.
        """
        order = next(self._orders)
        for executor in executors:
            # If the step is recorded, keep the recorder as observer. Errors then name only operations.
            if executor.observer is None:
                executor.observer = partial(self._naming, executor.plan)
        with self._simulated.step(order):
            yield

    def _naming(self, plan: Plan, code: Sequence[Bound], source: Sequence[int]) -> list[Bound]:
        return [
            partial(self._named, plan.instructions[i].where, bound)
            for i, bound in zip(source, code, strict=True)
        ]

    def _named(self, where: str, bound: Bound) -> object:
        self._simulated.doing = where
        try:
            return bound()
        finally:
            self._simulated.doing = ""
