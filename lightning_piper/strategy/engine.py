"""Compiled training steps and their executors, one for each layout and size of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_piper.capture import BatchLayout, History
from lightning_piper.compiler import Compiled, compile
from lightning_piper.runtime import StepResult
from lightning_piper.strategy.machine import Machine, Prepared, Settings
from lightning_piper.strategy.ownership import Ownership
from lightning_piper.strategy.variants import Variants
from lightning_piper.strategy.world import World

MANY_LAYOUTS = 16


class Engine:
    """Runs training steps on batches of any layout, under any Python state.

    The first layout is compiled at once, for ownership follows from it. Others are compiled when they first occur: another
    number of samples from the same capture, anything else from a capture of its own. All processes see batches of the same
    layout, so they compile together. Layouts are of what one process draws; with replicas, the step's batch is larger.

    Attributes:
        machine: on which the steps run.
        first: the program for the first layout.
        variants: the captures of the step.
    """

    def __init__(self, module: pl.LightningModule, layout: BatchLayout, settings: Settings, world: World) -> None:
        self._module, self._settings, self._world = module, settings, world
        self._layout = layout
        self.machine = Machine(settings, world)
        self.variants = Variants("training_step", self._capture)
        self.first = self.machine.compiled(lambda: self.variants.add(family(layout), layout))
        self._prepared: dict[tuple[int, Any], Prepared] = {}  # by number of the capture and layout

    @property
    def devices(self) -> int:
        """Logical devices of the program."""
        return len(self.first.plans)

    def bind(self, ownership: Ownership) -> None:
        """Connect the processes and bind the tensors that the plans work on: those of this process. Collective."""
        own = ownership
        self.machine.bind(self.first, own.owned_params, own.owned_buffers, own.shards, own.layout)
        self._prepared[(0, self._layout.key)] = self.machine.prepare(self.first)

    def find(self, layout: BatchLayout, batch_idx: int) -> Compiled | None:
        """The capture that means what this step means, if there is one. `batch_idx`: of the batch in its epoch."""
        self.variants.history.batch_idx = batch_idx
        return self.variants.find(family(layout))

    def prepared(self, layout: BatchLayout, captured: Compiled | None) -> Prepared:
        """What runs a batch of this layout; compiled when it is the first of its kind. Then, collective.

        Args:
            captured: what `find` gave.
        """
        key = (self.variants.number, layout.key)
        if captured is None or key not in self._prepared:
            warn_of_many_layouts(len({layout for _, layout in self._prepared}))
            made = self.machine.compiled(lambda: self._sized(captured, layout))
            key = (self.variants.number, layout.key)
            self._prepared[key] = self.machine.prepare(made)
        return self._prepared[key]

    def step(
        self, prepared: Prepared, leaves: Sequence[torch.Tensor], seed: int, scale: float = 1.0, last: bool = True
    ) -> StepResult:
        """One training step; gradients of what this process holds. `scale`, `last`: as in `Executor.step`."""
        return self.machine.run(prepared, prepared.compiled.step.inputs(leaves), seed, scale, last)

    def close(self) -> None:
        """Give the communicators back. Collective."""
        self._prepared.clear()
        self.machine.close()

    def _sized(self, captured: Compiled | None, layout: BatchLayout) -> Compiled:
        captured = self.variants.add(family(layout), layout) if captured is None else captured
        return captured.at(layout.size * self._settings.replicas, verify=self._settings.static)

    def _capture(self, layout: BatchLayout, history: History) -> Compiled:
        settings = self._settings
        return compile(
            self._module,
            layout.times(settings.replicas),
            list(settings.program),
            verify=settings.static,
            device=self._world.device,
            context=settings.context,
            history=history,
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
