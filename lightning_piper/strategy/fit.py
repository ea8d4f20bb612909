"""`Fit`: what one call of `Trainer.fit` needs from the first capture to the last step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_piper.capture import flatten
from lightning_piper.profile import Recording
from lightning_piper.strategy.agreement import BatchCheck, agree_on_loader, draw_seed
from lightning_piper.strategy.bridge import Bridge
from lightning_piper.strategy.checks import check_optimizers, check_runs_once, check_stays_captured, switches
from lightning_piper.strategy.data import Peek
from lightning_piper.strategy.engine import Engine
from lightning_piper.strategy.gradients import absent, mark
from lightning_piper.strategy.machine import Settings
from lightning_piper.strategy.materialize import Known, materialize
from lightning_piper.strategy.optimizer import ShardedOptimizer
from lightning_piper.strategy.ownership import Ownership
from lightning_piper.strategy.precision import GlobalNormClipping, LossScaling
from lightning_piper.strategy.suspension import check_devices, resume, suspend
from lightning_piper.strategy.verification import Verify, verify_by_execution
from lightning_piper.strategy.world import World


class Fit:
    """Made in `setup`: captures and verifies the step, distributes the module, connects the processes. Collective throughout.

    Args:
        module: in its precision, with the values to start from (the lead's count); parts may be on the meta device.
        peek: gives a batch to capture with.
        settings: of the compilation.
        verify: how the program is verified.
        seed: of the steps' random numbers, where a checkpoint brings one; else it is drawn.
        known: values from a checkpoint for what is on the meta device; the rest gets initial ones.

    Attributes:
        seed: the one that is used.
        running: the module is distributed; it is not after `close`.
        fresh: the step has not run on the current batch yet.
        report: of the verification by execution, on the lead.
        recording: what records the steps, if anything does.
    """

    def __init__(
        self, module: pl.LightningModule, peek: Peek, settings: Settings, verify: Verify, seed: int | None, known: Known,
        world: World,
    ) -> None:  # fmt: skip
        self._module, self._peek, self._world = module, peek, world
        drawn = draw_seed(world)
        self.seed: int = drawn if seed is None else seed
        if world.size == 1:
            materialize(module, drawn, known)
        batches = peek.batches()
        layout = world.on_lead(lambda: flatten(batches[0])[1] if batches else None)
        assert layout is not None
        self.engine = Engine(module, layout, settings, world)
        if not settings.local:
            check_devices(self.engine.first, world)
        self.report = verify_by_execution(verify, self.engine.first, module, batches, world)
        self.recording: Recording | None = None
        self._switches = switches(module)
        self._suspended = suspend(module, world)
        _count_replicas(module.trainer, world)
        self.ownership = Ownership(module, self.engine.first, world)
        self.ownership.distribute(drawn, known)
        self.engine.bind(self.ownership)
        self._absent = absent(self.ownership, self.engine.first)
        self._bridge = Bridge(self.ownership.owned_params, world.device)
        self._check = BatchCheck(world)
        self._epoch = -1
        self.running = self.fresh = True
        self.optimizer: ShardedOptimizer | None = None
        self._clipping: GlobalNormClipping | None = None
        self._scaling: LossScaling | None = None

    def attach(self, optimizers: list[Optimizer], plugin: Precision) -> None:
        """Cut the optimizer down to what this process holds, let clipping see all gradients, and all processes skip the same steps.

        Raises:
            PiperError: there are several optimizers, or one that cannot be divided.
        """
        check_optimizers(optimizers, self._world.size)
        self.optimizer = ShardedOptimizer(optimizers[0], self.ownership, self.engine.first, self._world)
        self._scaling = LossScaling(plugin, optimizers[0], self._world)
        if self._world.size > 1:
            self._clipping = GlobalNormClipping(plugin, self.ownership, self._world)

    def loader(self, loader: object) -> object:
        """The training data as they are to be iterated over."""
        return self._peek.with_first(agree_on_loader(loader, self._world))

    def step(self, batch: Any, number: int, epoch: int, last: bool = True) -> torch.Tensor:
        """Run the plan on a batch: logs what the step logs, and returns its loss.

        Args:
            batch: on this process's device.
            number: of the batch, counted over the whole training, epochs and resumed fits included.
            epoch: current one.
            last: of the batches of a gradient accumulation.
        """
        if epoch != self._epoch:
            check_stays_captured(self._module, self._switches)
            self._epoch = epoch
        check_runs_once(self.fresh, self._world.size)
        self.fresh = False
        leaves, layout = flatten(batch)
        self._check.post(layout, leaves)
        prepared = self.engine.prepared(layout)
        scale = 1.0 if self._scaling is None else self._scaling.scale
        if self.recording is not None:
            self.recording.before(prepared)
        self.ownership.refresh()
        result = self.engine.step(prepared, leaves, self.seed + number, scale, last)
        if self.recording is not None:
            self.recording.after(prepared, number)
        mark(self._absent)
        prepared.replay(self._module, result.metrics)
        assert prepared.replay.dtype is not None
        value = result.metrics[0].to(prepared.replay.dtype, copy=True)
        return self._bridge.loss(value, result.grads, scale, kept=prepared.carries and not last)

    def close(self, failed: bool) -> None:
        """End the fit; unless it failed, every process that had the whole module has it again. Collective, unless it failed."""
        self.running = False
        if self._clipping is not None:
            self._clipping.remove()
        if self._scaling is not None:
            self._scaling.remove()
        resume(self._suspended)
        if not failed:
            if self.recording is not None:
                self.recording.close()
            self._check.finish()
            self.ownership.end()
            self.engine.close()


def _count_replicas(trainer: pl.Trainer, world: World) -> None:
    """Let monitors of the throughput multiply what a process sees by the number of replicas, not of processes. What they call a
    device is then a replica."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():  # made anew for each fit
                if throughput.available_flops is not None:
                    throughput.available_flops *= world.size // world.count
                throughput.world_size = world.count
