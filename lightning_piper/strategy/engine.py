"""Compiled training steps and their executors, one for each layout and size of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_piper.capture import BatchLayout
from lightning_piper.compiler import Compiled, compile
from lightning_piper.runtime import StepResult
from lightning_piper.strategy.machine import Machine, Prepared, Settings
from lightning_piper.strategy.ownership import Ownership
from lightning_piper.strategy.world import World

MANY_LAYOUTS = 16


class Engine:
    """Runs training steps on batches of any layout.

    The first layout is compiled at once, for ownership follows from it. Others are compiled when they first occur: another
    number of samples from the same capture, anything else from a capture of its own. All processes see batches of the same
    layout, so they compile together. Layouts are of what one process draws; with replicas, the step's batch is larger.

    Attributes:
        machine: on which the steps run.
        first: the program for the first layout.
    """

    def __init__(self, module: pl.LightningModule, layout: BatchLayout, settings: Settings, world: World) -> None:
        self._module, self._settings, self._world = module, settings, world
        self._layout = layout
        self.machine = Machine(settings, world)
        self.first = self._capture(layout)
        self._captured: dict[tuple[Any, ...], Compiled] = {family(layout): self.first}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    @property
    def devices(self) -> int:
        """Logical devices of the program."""
        return len(self.first.plans)

    def bind(self, ownership: Ownership) -> None:
        """Connect the processes and bind the tensors that the plans work on: those of this process. Collective."""
        own = ownership
        self.machine.bind(self.first, own.owned_params, own.owned_buffers, own.shards, own.layout)
        self._prepared[self._layout.key] = self.machine.prepare(self.first)

    def prepared(self, layout: BatchLayout) -> Prepared:
        """What runs a batch of this layout; compiled when it is the first of its kind. Then, collective."""
        found = self._prepared.get(layout.key)
        if found is None:
            found = self._prepared[layout.key] = self.machine.prepare(self._compiled(layout))
        return found

    def step(
        self, prepared: Prepared, leaves: Sequence[torch.Tensor], seed: int, scale: float = 1.0, last: bool = True
    ) -> StepResult:
        """One training step; gradients of what this process holds. `scale`, `last`: as in `Executor.step`."""
        return self.machine.run(prepared, leaves, seed, scale, last)

    def close(self) -> None:
        """Give the communicators back. Collective."""
        self._prepared.clear()
        self.machine.close()

    def _compiled(self, layout: BatchLayout) -> Compiled:
        kind = family(layout)
        warn_of_many_layouts(len(self._prepared))
        if kind not in self._captured:
            self._captured[kind] = self._capture(layout)
        captured = self._captured[kind]
        return self.machine.compiled(lambda: captured.at(layout.size * self._settings.replicas, verify=self._settings.static))

    def _capture(self, layout: BatchLayout) -> Compiled:
        settings = self._settings
        return self.machine.compiled(
            lambda: compile(
                self._module,
                layout.times(settings.replicas),
                list(settings.program),
                verify=settings.static,
                device=self._world.device,
                context=settings.context,
            )
        )


def warn_of_many_layouts(known: int) -> None:
    """Warn, once, when one more layout is about to be compiled."""
    if known == MANY_LAYOUTS:
        rank_zero_warn(
            f"batches came in more than {MANY_LAYOUTS} layouts (shapes of tensors, numbers and strings beside them), and the "
            "step is compiled anew for each one; pad them to a few shapes, and leave out what the step does not use"
        )


def family(layout: BatchLayout) -> tuple[Any, ...]:
    """Equal for layouts that differ in the number of samples alone."""
    return layout.structure, tuple((spec.shape[1:], len(spec.shape), spec.dtype) for spec in layout.specs)
