"""Steps with all devices in this process, on a simulated accelerator: each in another drawn order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from lightning_piper.accelerators.simulated import Simulated
from lightning_piper.ops.base import Bound
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.executor import Executor


class OnSimulated:
    """Where executors are made and run. Gradients that are kept from one step to the next stay in its memory."""

    def __init__(self) -> None:
        self._simulated, self._orders = Simulated(0), itertools.count()

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Executors that are made here issue to it."""
        with self._simulated.bound():
            yield

    @contextlib.contextmanager
    def step(self, executors: Sequence[Executor]) -> Iterator[None]:
        """A step of these.

        Raises:
            ExecutionError: names two operations of which one does not wait for the other, or memory that is in use again, with the
                instructions of the plans and their streams.
        """
        order = next(self._orders)
        for executor in executors:
            if executor.observer is None:  # else the step is recorded, and errors name operations alone
                executor.observer = partial(self._naming, executor.plan)
        with self._simulated.step(order):
            yield

    def _naming(self, plan: Plan, code: Sequence[Bound], source: Sequence[int]) -> list[Bound]:
        return [partial(self._named, plan.instructions[i].where, bound) for i, bound in zip(source, code, strict=True)]

    def _named(self, where: str, bound: Bound) -> object:
        self._simulated.doing = where
        try:
            return bound()
        finally:
            self._simulated.doing = ""
