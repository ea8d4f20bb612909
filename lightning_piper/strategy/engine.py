"""Compiled programs and their executors, one for each layout and size of the batch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_piper.capture import BatchLayout
from lightning_piper.compiler import Compiled, compile
from lightning_piper.directives import Directive
from lightning_piper.errors import PiperError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.runtime import Carry, Executor, LocalTransport, ProcessTransport, StepResult, joined, run_local
from lightning_piper.strategy.replay import Replay
from lightning_piper.strategy.world import World, described, of_rank

Context = Callable[[], contextlib.AbstractContextManager[Any]]
MANY_LAYOUTS = 16


@dataclass(frozen=True)
class Settings:
    """Attributes:
    program: the directives.
    replicas: of which each process draws the batches of one; 1 also where one process draws those of all.
    static: run the static check on everything that is compiled.
    context: entered around the step while it is captured.
    local: all devices in this process.
    timeout: of communication.
    """

    program: Sequence[Directive]
    replicas: int
    static: bool
    context: Context
    local: bool
    timeout: timedelta | None


@dataclass(frozen=True)
class Prepared:
    """What runs one layout and size: the executors of this process and the replay of the step's logging."""

    compiled: Compiled
    executors: list[Executor]
    replay: Replay

    @property
    def carries(self) -> bool:
        """Does a step that is not the last one of an accumulation keep gradients back?"""
        return any(executor.carries for executor in self.executors)


class Engine:
    """Runs training steps on batches of any layout.

    The first layout is compiled at once, for ownership follows from it. Others are compiled when they first occur: another
    number of samples from the same capture, anything else from a capture of its own. All processes see batches of the same
    layout, so they compile together. Layouts are of what one process draws; with replicas, the step's batch is larger.
    """

    def __init__(self, module: pl.LightningModule, layout: BatchLayout, settings: Settings, world: World) -> None:
        self._module, self._settings, self._world = module, settings, world
        self._layout = layout
        self.first = self._capture(layout)
        self._captured: dict[tuple[Any, ...], Compiled] = {_family(layout): self.first}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._params: Mapping[str, torch.Tensor] = {}
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._shards: Mapping[int, Mapping[Bucket, torch.Tensor]] = {}
        self._carried: dict[int, Carry] = {}
        self._transport: ProcessTransport | None = None

    @property
    def devices(self) -> int:
        """Logical devices of the program."""
        return len(self.first.plans)

    def bind(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        shards: Mapping[int, Mapping[Bucket, torch.Tensor]],
    ) -> None:
        """Connect the processes and bind the tensors that the plans work on: those of this process. Collective.

        Args:
            params, buffers: by canonical name.
            shards: device -> what it keeps of the buckets of which it has a shard.
        """
        self._params, self._buffers, self._shards = params, buffers, shards
        if not self._settings.local:
            ranks = range(self._world.size)
            self._transport = ProcessTransport(self.first.plans, ranks, self._world.device, self._settings.timeout)
        self._prepared[self._layout.key] = self._prepare(self.first)

    def prepared(self, layout: BatchLayout) -> Prepared:
        """What runs a batch of this layout; compiled when it is the first of its kind. Then, collective."""
        found = self._prepared.get(layout.key)
        if found is None:
            found = self._prepared[layout.key] = self._prepare(self._compiled(layout))
        return found

    def step(
        self, prepared: Prepared, leaves: Sequence[torch.Tensor], seed: int, scale: float = 1.0, last: bool = True
    ) -> StepResult:
        """One training step; gradients of what this process holds. `scale`, `last`: as in `Executor.step`."""
        if self._settings.local:
            results = run_local(prepared.executors, leaves, seed, scale, last)
            return StepResult(joined([executor.plan for executor in prepared.executors], results), results[0].metrics)
        return prepared.executors[0].step(leaves, seed, scale, last)

    def close(self) -> None:
        """Give the communicators back. Collective."""
        self._prepared.clear()
        self._carried.clear()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _compiled(self, layout: BatchLayout) -> Compiled:
        family = _family(layout)
        if len(self._prepared) == MANY_LAYOUTS:
            rank_zero_warn(
                f"batches came in more than {MANY_LAYOUTS} layouts (shapes of tensors, numbers and strings beside them), and the "
                "step is compiled anew for each one; pad them to a few shapes, and leave out what the step does not use"
            )
        if family not in self._captured:
            self._captured[family] = self._capture(layout)
        captured = self._captured[family]
        return self._together(lambda: captured.at(layout.size * self._settings.replicas, verify=self._settings.static))

    def _capture(self, layout: BatchLayout) -> Compiled:
        settings = self._settings
        specs = layout.times(settings.replicas).specs
        example = layout.rebuild([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs])
        return self._together(
            lambda: compile(
                self._module,
                example,
                list(settings.program),
                verify=settings.static,
                device=self._world.device,
                context=settings.context,
            )
        )

    def _prepare(self, compiled: Compiled) -> Prepared:
        self._check_shards(compiled)
        if self._settings.local:
            local = LocalTransport(compiled.plans)
            executors = [self._executor(compiled, device, local) for device in sorted(compiled.plans)]
        else:
            assert self._transport is not None
            self._check_held(compiled)
            self._transport.connect(compiled.plans)
            executors = [self._executor(compiled, self._world.rank, self._transport)]
        return Prepared(compiled, executors, Replay(compiled))

    def _executor(self, compiled: Compiled, device: int, transport: LocalTransport | ProcessTransport) -> Executor:
        shards, carry = self._shards.get(device, {}), self._carried.setdefault(device, {})
        return Executor(
            compiled.plans[device], compiled.step, self._params, self._buffers, transport, self._world.device, shards, carry
        )

    def _together(self, work: Callable[[], Compiled]) -> Compiled:
        """Compile on all processes, and check that all compiled the same for the same module. If one fails, all do. Collective."""
        failure: Exception | None = None
        parts: list[str] = []
        try:
            compiled = work()
            parts = [*map(str, compiled.plans.values()), repr(compiled.step.params), repr(compiled.step.buffers)]
        except Exception as error:
            failure = error
        found = self._world.gather((None if failure is None else described(failure), zlib.crc32("\n".join(parts).encode())))
        if failure is not None:
            raise failure
        for rank, (problem, _) in enumerate(found):
            if problem is not None:
                raise of_rank(rank, PiperError(f"rank {rank}: {problem}"))
        if len(set(found)) > 1:
            raise PiperError(
                "the processes compiled different plans, or their modules differ in names or shapes. Build the module in the same "
                "way in every process, not depending on the rank"
            )
        return compiled

    def _check_shards(self, compiled: Compiled) -> None:
        """All programs of a fit work on the flat tensors of the first one's buckets."""
        for device, plan in compiled.plans.items():
            others = sorted({n for b, _ in plan.shards.items() - self.first.plans[device].shards.items() for n in b.names})
            if others:
                raise PiperError(
                    f"for batches of {compiled.dag.size} samples in this layout, device {device} has other shards of "
                    f"{', '.join(others[:3])} than for the first batch, for the step uses parameters in other regions. Give "
                    "batches of one layout, or drop shard_optimizer, shard_grads and shard_params"
                )

    def _check_held(self, compiled: Compiled) -> None:
        """This process holds what its plan works on."""
        device = self._world.rank
        needed = compiled.params_on(device) | compiled.buffers_on(device)
        needed -= {name for bucket in compiled.plans[device].shards for name in bucket.names}
        missing = sorted(needed - set(self._params) - set(self._buffers))
        if missing:
            raise PiperError(
                f"for batches of {compiled.dag.size} samples in this layout, device {device} uses {', '.join(missing)}, which it "
                "does not hold: for the first batch, another device used it. Give an example_batch whose step uses everything"
            )


def _family(layout: BatchLayout) -> tuple[Any, ...]:
    """Equal for layouts that differ in the number of samples alone."""
    return repr(layout.skeleton), tuple((spec.shape[1:], len(spec.shape), spec.dtype) for spec in layout.specs)
