"""`EagerOptimizer`: an optimizer of an uncaptured training step, whose state is divided over the replicas
(ZeRO-1).

The user's code sees whole parameters, gradients and groups. Inside `optimizer.step`, after its closure, the
groups contain this process's shards. After `optimizer.step` returns, a plan gathers the updated shards of all
processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_piper.capture import CapturedStep
from lightning_piper.capture.eager.eager_step import EagerStep, RegatherStep
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import Directive
from lightning_piper.directives.replicate import shards_of, with_divided_optimizer
from lightning_piper.errors import PiperError
from lightning_piper.holdings.aliased_shards import AliasedShards
from lightning_piper.holdings.host_states import HostStates
from lightning_piper.holdings.optimizer import Names, ShardedOptimizer, State, usual_state
from lightning_piper.processes.world import World, on_host
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.process_runtime import ProcessRuntime, Settings


def compiled_eager(
    settings: Settings, program: Sequence[Directive], step: EagerStep, training: Compiled | None = None
) -> Compiled:
    """Return the program applied to a step of user code, which takes the place of a captured step.

    `compile_step` uses only the attributes that an `EagerStep` or a `RegatherStep` has. `training` is the
    program that determines where parameters are; None if this program determines it.
    """
    dag = None if training is None else training.dag
    return compile_step(cast(CapturedStep, step), tuple(program), None, settings.static, dag, settings.device)


def divided(before: Standalone, named: Sequence[tuple[Optimizer, Names]]) -> tuple[EagerOptimizer, ...]:
    """If the program shards optimizer state, divide the optimizers of a module that is whole on every
    process. Collective.

    Args:
        before: The module and its settings before the fit.
        named: Each optimizer with the names of its parameters.

    Returns:
        The divided optimizers; empty if the program does not shard optimizer state.

    Raises:
        PiperError: Two optimizers share a parameter, or one does not treat each element independently.
    """
    module, settings = before.module, before.settings
    if not any(map(shards_of, settings.program)):
        return ()
    found = [
        name
        for _, groups in named
        for name in dict.fromkeys(name for names in groups for name in names if name is not None)
    ]
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise PiperError(
            f"PiperStrategy: parameter {twice!r} is in several optimizers, so its optimizer state cannot be "
            "sharded. Use zero=0 (in directives, a replicate without shard_*) [PIPER-S004]"
        )
    return tuple(
        EagerOptimizer(module, optimizer, groups, settings, before.world)
        for optimizer, groups in named
        if any(name is not None for names in groups for name in names)
    )


class EagerOptimizer:
    """An optimizer whose state is divided over the replicas. Collective: all processes create it and step it
    at the same time.

    Args:
        module: The module that is trained, whole on every process.
        optimizer: The module's optimizer, whole on every process. The optimizer may already have state.
        names: Names of the optimizer's parameters, by group.

    Attributes:
        optimizer: The optimizer that was passed.

    Raises:
        PiperError: The optimizer does not treat each element independently, or its `state_dict` does not have
            the form of torch's optimizers.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, names: Names, settings: Settings, world: World
    ) -> None:
        self.optimizer, self._world, state = optimizer, world, usual_state(optimizer)
        own = list(dict.fromkeys(name for group in names for name in group if name is not None))
        program, runtime = with_divided_optimizer(settings.program), ProcessRuntime(settings, world)
        step = EagerStep(module, settings.replicas, own, world.device, own)
        training = runtime.compiled(partial(compiled_eager, settings, program, step))
        regather = RegatherStep(module, settings.replicas, own, world.device)
        gathering = runtime.compiled(partial(compiled_eager, settings, program, regather, training))
        self._runtime, self._tensors = runtime, AliasedShards(module, training, world)
        runtime.bind(training, self._tensors)
        self._gathering = runtime.prepare(gathering)
        # The parameters of each group: whole ones, and then (`_cut`) this process's shards.
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        self._sharded = ShardedOptimizer(optimizer, names, self._tensors, training, world)
        if training.dag.hosted:
            HostStates(self._sharded, training.dag.hosted, world.device)
        self._cut = [list(group["params"]) for group in optimizer.param_groups]
        if state["state"]:
            self._sharded.load_full_state(state)
        self._put(self._whole)
        # `_inside`: whether the groups contain shards for an update. `_closed`: whether `close` was called.
        self._inside = self._closed = False
        # `step` must be a bound method, because a scheduler that is created later (SWALR) expects one.
        optimizer.step = MethodType(self._around(optimizer.step), optimizer)  # type: ignore[method-assign]

    def _put(self, params: Sequence[Sequence[torch.Tensor]]) -> None:
        """Put these parameters into the optimizer's groups."""
        for group, own in zip(self.optimizer.param_groups, params, strict=True):
            group["params"][:] = own

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of the optimizer's `step`, whose update works on shards.

        Without a closure, the groups contain shards during the whole step. With a closure, they contain
        shards from the end of the closure on. After the step, a plan gathers the updated shards. If the
        optimizer does not call its closure exactly once, the step raises PiperError. After `close`, the
        original `step` runs.
        """

        # `wraps` keeps the attribute by which learning rate schedulers recognize a wrapped step.
        @functools.wraps(step)
        def stepped(_: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if self._closed:
                return step(closure, *args, **kwargs)
            try:
                if closure is None:
                    self._enter()
                    found = step(*args, **kwargs)
                else:
                    found = step(partial(self._once, closure), *args, **kwargs)
                entered = self._inside
            finally:
                self._leave()
            if not entered:
                raise PiperError(
                    f"PiperStrategy: {type(self.optimizer).__name__}.step has not called the closure that it "
                    "was given, so its state cannot be sharded over the replicas. Use an optimizer that "
                    "calls its closure once [PIPER-S004]"
                )
            self._tensors.updated()
            self._runtime.run(self._gathering, [], seed=0)
            self._tensors.changed()
            return found

        return stepped

    def _once(self, closure: Callable[[], Any]) -> Any:
        """Run the closure of an optimizer step.

        Raises:
            PiperError: The optimizer calls the closure a second time.
        """
        if self._inside:
            raise PiperError(
                f"PiperStrategy: {type(self.optimizer).__name__} runs its closure twice in a step. At the "
                "second call, each process has updated only its own shard of the parameters. Use an "
                "optimizer that calls its closure once [PIPER-S004]"
            )
        found = closure()
        self._enter()
        return found

    @property
    def has_changed(self) -> bool:
        """Whether the optimizer's groups have changed since its state was divided: their parameters, or the
        order of the parameters."""
        now = [group["params"] for group in self.optimizer.param_groups]
        return [list(map(id, params)) for params in now] != [list(map(id, params)) for params in self._whole]

    def _check_groups_stay(self) -> None:
        if self.has_changed:
            raise PiperError(
                "PiperStrategy: the optimizer's parameter groups have changed since on_train_batch_start, while its "
                "state was sharded over the replicas. Change them (add_param_group) in on_train_batch_start "
                "[PIPER-S005]"
            )

    def _enter(self) -> None:
        """Put this process's shards, with their gradients, into the groups for the update."""
        self._check_groups_stay()
        self._tensors.lay()
        self._tensors.take_gradients()
        self._put(self._cut)
        self._inside = True

    def _leave(self) -> None:
        if self._inside:
            self._put(self._whole)
        self._inside = False

    @contextmanager
    def _as_cut(self) -> Iterator[ShardedOptimizer]:
        """Return a context in which the groups contain this process's shards."""
        self._check_groups_stay()
        self._put(self._cut)
        try:
            yield self._sharded
        finally:
            self._put(self._whole)

    def full_state(self) -> State:
        """Return the optimizer state in canonical form. It is complete on rank 0. Other ranks return only a
        part. Collective."""
        with self._as_cut() as sharded:
            return sharded.full_state()

    def load_full_state(self, full: Mapping[str, Any]) -> None:
        """Load this process's part of a state in canonical form."""
        with self._as_cut() as sharded:
            sharded.load_full_state(full)

    def end(self) -> None:
        """Make the optimizer whole again, with its current groups, so that it can be divided differently.
        Collective."""
        now, old = self.optimizer.param_groups, self._whole
        if len(now) < len(old):
            self._check_groups_stay()
        # `full_state` needs the parameters from the division of the state, and the current options. Groups that
        # were added since then are not divided yet.
        self.optimizer.param_groups = [
            {**group, "params": list(own)} for group, own in zip(now, old, strict=False)
        ]
        full = self._world.broadcast(on_host(self.full_state()))
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(full)
        self.optimizer.param_groups = now
        self.close(failed=False)

    def close(self, failed: bool) -> None:
        """End the fit. The optimizer has its own parameters and `step` again, but not its whole state:
        `full_state` returns it. Collective, unless the fit failed."""
        self._closed = True
        self._tensors.restore()
        self._runtime.close(failed)
