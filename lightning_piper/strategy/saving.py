"""The part of `PiperStrategy` that writes and reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_piper.checkpoint.memory_copy import MEMORY
from lightning_piper.checkpoint.sharded_checkpoint import open_checkpoint
from lightning_piper.checkpoint.state import (
    HeldTensors,
    Loading,
    add_optimizer_states,
    module_state,
    optimizer_state,
    own_optimizer_state,
    referenced,
    tensor_ranges_of,
)
from lightning_piper.checkpoint.tensor_ranges import TensorRange
from lightning_piper.common.lightning_packages import is_a
from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.holdings.optimizer import State, check_groups
from lightning_piper.holdings.placeholders import check_values
from lightning_piper.processes.world import on_host
from lightning_piper.session.local_sgd import end_without_updates
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.checkpoints import (
    Saves,
    check_target,
    found_at,
    is_behind,
    own_entry,
    read_plain,
)
from lightning_piper.strategy.compatibility import averaging
from lightning_piper.strategy.evaluation import EvaluatingStrategy
from lightning_piper.strategy.fit import Fit
from lightning_piper.strategy.loading.other_optimizer import NamingOptimizers
from lightning_piper.strategy.phases import Eager, Ended, Fitting, Idle, Starting
from lightning_piper.strategy.process_management import Requeue
from lightning_piper.strategy.spares import _lightning as spares
from lightning_piper.strategy.spares.checks import check_callbacks
from lightning_piper.strategy.spares.module_state import restore_modes
from lightning_piper.strategy.spares.written_files import WrittenFiles

# Entries that only a copy in memory has: other state of the fit, which has the reason why its step runs uncaptured, and
# the names of tensors that the module's state dict does not have.
OUTSIDE, EAGER, BESIDE = "outside", "eager", "beside"
OF_REPLICA = ("state_dict", "optimizer_states")  # entries of a checkpoint that differ between local replicas


class SavingStrategy(EvaluatingStrategy):
    """A strategy that saves and loads the checkpoints of a fit.

    Args:
        given: Positional arguments of `EvaluatingStrategy`.
        sharded: Whether every process writes its own part.
        options: Other arguments of `EvaluatingStrategy`.
    """

    def __init__(self, *given: Any, sharded: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self._sharded = sharded
        self._saves, self._requeue = Saves(), Requeue()
        self._in_memory = False  # whether the next content of a checkpoint is for a copy in memory
        self._held: tuple[Fit, HeldTensors] | None = None  # of the last fit that asked for it
        self._written = WrittenFiles()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_held": None}

    def _in_ranges(self) -> bool:
        return (self._sharded or self._in_memory) and isinstance(self.phase, Fitting)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, whole on rank 0. On other ranks, tensors of other processes have no
        data. For sharded checkpoints, the dict has references in place of tensors. Collective."""
        if not isinstance(self.phase, Fitting | Ended) or not (self._sharded or self._in_memory):
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        self.phase.fit.ownership.check_unwritten()
        with self._whole_metrics():
            return module_state(self.lightning_module, self.phase.fit.program.step.canonical)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as one device would have it: all of it on rank 0, perhaps a part on
        other ranks. For sharded checkpoints, the state has references in place of tensors. Collective."""
        if is_a(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._in_memory and isinstance(self.phase, Fitting):
            return own_optimizer_state(self.phase.fit.optimizer, self.phase.fit.ownership.tensor_map)
        left = self.phase.left
        if left.state is not None:
            if referenced(left.state):
                raise PiperError(
                    "PiperStrategy: a fit that resumes from a sharded checkpoint reads the optimizer's state "
                    "at the first batch, and cannot be saved before. Save after the first step [PIPER-K006]"
                )
            own = super().optimizer_state(optimizer)
            return {**own, "state": left.state["state"]} if "state" in left.state else dict(left.state)
        fit = self.phase.fit if self._sharded and isinstance(self.phase, Fitting | Ended) else None
        if fit is not None and fit.optimizer.optimizer is optimizer:
            return optimizer_state(fit.optimizer)
        state = left.full_state(optimizer)
        return super().optimizer_state(optimizer) if state is None else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states. Before the first batch, this may wait for it: see `Starting.load`."""
        with NamingOptimizers(self.optimizers):
            self._load_optimizers(checkpoint["optimizer_states"])

    def _load_optimizers(self, states: Sequence[State]) -> None:
        if isinstance(self.phase, Eager) or (isinstance(self.phase, Starting) and self.phase.eager):
            if self._copies is not None and self._restored.sharded is not None:
                states = [self._restored.sharded.whole_state(state) for state in states]
            if any(referenced(state) for state in states):
                raise PiperError(
                    "PiperStrategy: an uncaptured training step cannot resume from a sharded checkpoint. "
                    "Resume from a copy: lightning_piper.strategy.consolidate(path, copy) [PIPER-K006]"
                )
            _check_number(len(states), len(self.optimizers))
            for optimizer, state in zip(self.optimizers, states, strict=True):
                self.phase.load(optimizer, state) if isinstance(
                    self.phase, Eager
                ) else optimizer.load_state_dict(state)
            _lightning.move_optimizers(self.optimizers, self.root_device)
            return
        if not states:
            return
        _check_number(len(states), 1)
        if isinstance(self.phase, Fitting | Ended):
            check_groups(self.phase.fit.optimizer.names, states[0])
            self._load_optimizer(self.phase.fit, states[0])
            _lightning.move_optimizers(self.optimizers, self.root_device)
        else:
            assert isinstance(self.phase, Starting) and self.lightning_module is not None
            ranges = self._has_ranges(states[0])
            self.phase.load(states[0], self.optimizers[0], self.lightning_module, ranges)

    def _has_ranges(self, state: State) -> bool:
        """Return whether the processes read an optimizer's state in ranges. In a copy in memory, the state of a process that
        holds no parameters is empty."""
        restored = self._restored
        return restored.sharded is not None and (bool(restored.outside) or bool(referenced(state)))

    def _load_optimizer(self, fit: Fit, state: State) -> None:
        if self._restored.sharded is not None and self._has_ranges(state):
            self._restored.sharded.optimizer(state, fit.optimizer, fit.ownership.tensor_map)
        else:
            fit.optimizer.load_full_state(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's values. If the checkpoint is sharded, first replace the references in the entries
        of callbacks by tensors, in `checkpoint` itself."""
        parts = self.phase.fit.ownership if isinstance(self.phase, Fitting) else None
        restored = self._restored
        if restored.sharded is not None:
            assert isinstance(checkpoint, dict) and self.lightning_module is not None
            # A callback that averages weights also reads the states of the module.
            trainer = _lightning.trainer_of(self.lightning_module)
            averages = trainer is not None and averaging(trainer)
            states = ["state_dict", "current_model_state"] if averages else []
            restored.sharded.read(checkpoint, ["callbacks", *states])
        if restored.sharded is not None and referenced(checkpoint["state_dict"]):
            assert self.lightning_module is not None
            restored.values = restored.sharded.module(
                self.lightning_module, checkpoint["state_dict"], strict, parts
            )
            return
        super().load_model_state_dict(checkpoint, strict)
        if parts is not None:
            parts.load(restored.values)
            restored.values = {}

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the content of a checkpoint, without Piper's entry `KEY`. If the checkpoint is sharded, the
        content has references in place of tensors, and `_restored.sharded` can read them. Collective."""
        self._saves.wait()
        world, restored = self.world, self._restored
        if checkpoint_path == MEMORY and self._copies is not None:
            opened = self._copies.take(self.global_rank)
            content = opened.common
            beside = content.pop(BESIDE)
            restored.sharded = Loading(opened, world, beside) if opened.tensors else None
            restored.outside = content.pop(OUTSIDE)
            assert self.lightning_module is not None
            lost = []
            for content_of, is_lost in opened.others:
                other = content_of()
                add_optimizer_states(content, other)
                lost += [other[OUTSIDE]] * is_lost
            spares.add_lost(self.lightning_module.trainer, restored.outside, lost)
            # The Trainer does this after it has loaded the values, which would then be rounded.
            self.precision_plugin.convert_module(self.lightning_module)
            # the process may have left a validation
            restore_modes(self.lightning_module, restored.outside["module"])
            self._loaders.load(restored.take_entry(content))
            return content
        place, sharded = found_at(checkpoint_path, self.checkpoint_io, world)
        restored.sharded = (
            Loading(open_checkpoint(place, world, weights_only is not False), world) if sharded else None
        )
        if restored.sharded is None:
            content = read_plain(
                place, self.checkpoint_io, world, partial(super().load_checkpoint, place, weights_only)
            )
        else:
            content = restored.sharded.content
        # Without this entry, hooks get the same content as from another strategy.
        self._loaders.load(restored.take_entry(content))
        self._take_local_replica(content)
        return content

    def _take_local_replica(self, content: dict[str, Any]) -> None:
        """If a fit with local SGD resumes, put the values of this process's local replica into the content of a
        checkpoint, which has the values of replica 0.

        Raises:
            PiperError: The checkpoint is sharded, or has another number of local replicas.
        """
        settings, state = self._local_sgd, self._restored.local_sgd
        module = self.lightning_module
        if settings is None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._restored.sharded is not None:
            raise PiperError(
                "PiperStrategy(local_sgd=...) cannot resume from a sharded checkpoint. Convert it with "
                "lightning_piper.strategy.consolidate [PIPER-K006]"
            )
        if state is None:
            return
        others = state["replicas"]
        if len(others) + 1 != settings.replicas:
            raise PiperError(
                f"the checkpoint has the states of {len(others) + 1} local replicas, but this fit has "
                f"LocalSGD(replicas={settings.replicas}). Resume with the same number of replicas [PIPER-K003]"
            )
        content["state_dict"] = state["first"] = state.pop("before_end", content["state_dict"])
        if self._local_replica:
            content |= others[self._local_replica - 1]

    def _end_without_updates(self, phase: Starting) -> None:
        """If a fit with local SGD has resumed and ended without a batch, let its replicas end with one model, as
        all fits do."""
        state, module = self._restored.local_sgd, phase.standalone.module
        if state is not None and self._local_sgd is not None and not is_on_meta(module):
            end_without_updates(module, state, state["first"])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint: rank 0 alone, or every process its own part if the checkpoint is sharded. Only a
        fit with a captured step has sharded checkpoints, from its first batch on."""
        self.on_train_end()  # reads a flag that may forbid this save, and the positions of loaders
        phase, io = self.phase, self.checkpoint_io
        # Outside of a run, no code would wait for the end of the write.
        later = is_behind(io, filepath) and not isinstance(phase, Idle | Ended) and not self._requeue.saves
        steady = None
        if later:  # an uncaptured step may change everything
            steady = self._tensors_of(phase.fit).steady_memory if isinstance(phase, Fitting) else set[int]()
        rounds = self._rounds_entry(checkpoint)
        assert self.lightning_module is not None
        checkpoint |= own_entry(
            seed=phase.left.seed,
            loaders=self._loaders.content(self._drawing),
            local_sgd=rounds,
            monitored=_lightning.monitored(self.lightning_module),
        )
        if self._sharded and isinstance(phase, Fitting | Ended):
            check_target(filepath, storage_options, io)
            fit, running = phase.fit, isinstance(phase, Fitting)
            keys = referenced(checkpoint)
            tensor_ranges = tensor_ranges_of(
                self.lightning_module, fit.ownership, fit.optimizer, keys, running
            )
            tensor_ranges += self._averages.ranges(checkpoint) if self._averages is not None else []
            self._saves.sharded(filepath, tensor_ranges, checkpoint, self.world, steady)
        elif self.is_global_zero:
            self._saves.plain(io, checkpoint, filepath, storage_options, steady)

    def _tensors_of(self, fit: Fit) -> HeldTensors:
        """Return the tensors that this process holds now."""
        if self._held is None or self._held[0] is not fit:
            self._held = fit, HeldTensors(self.global_rank, fit.ownership, fit.optimizer)
        self._held[1].look()
        return self._held[1]

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run an optimizer's step, whose update waits until the last checkpoint, and the state in memory, is copied."""

        def computed() -> Any:
            result = closure()
            self._settle()
            return result

        return super().optimizer_step(optimizer, computed, model, **kwargs)

    def _settle(self) -> None:
        """Wait for the threads that copy parameters or states of the optimizer."""
        self._saves.late.settle()
        if self._copies is not None:
            self._copies.late.settle()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Do not watch the copied memory inside of this context, because its code does not change it."""
        with self._saves.late.unwatched(), self._copies.late.unwatched() if self._copies else nullcontext():
            yield

    def on_validation_start(self) -> None:
        self._settle()
        super().on_validation_start()

    def _keep_copies(self, trainer: pl.Trainer) -> None:
        """Keep a copy of the fit's state at the start of each batch until the end of the run. If the fit continues from
        such a copy, begin with the batch of the copy.

        Raises:
            PiperError: A callback supports no spares.
        """
        check_callbacks(trainer, self._spare_count)
        self._at_end.callback(spares.before_batches(trainer, partial(self._keep_copy, trainer)))
        self._at_end.callback(self._written.watch(trainer, continues=trainer.ckpt_path == MEMORY))
        if trainer.ckpt_path == MEMORY:
            spares.continue_with_batch(trainer)
            outside = self._restored.outside
            spares.restore_outside(trainer, outside)
            assert isinstance(self.phase, Starting)
            self.phase.eager = self.phase.eager or outside[EAGER]

    def _keep_copy(self, trainer: pl.Trainer) -> None:
        """Keep a copy of this process's part of the fit's state in memory, if a copy is due at the start of this batch, or
        if an epoch starts. The first batch of a fit does not have a copy. Collective.

        A batch that continues an accumulation, or that begins with a new parameter group, does not have a copy.

        Raises:
            PiperError: Another process does not have the state of this process's replica.
        """
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        phase, copies = self.phase, self._copies
        assert copies is not None
        if isinstance(phase, Starting) and trainer.ckpt_path == MEMORY:
            # Lightning draws random numbers until here.
            spares.restore_random_numbers(self._restored.outside["random"])
        continues = isinstance(phase, Starting) or batches.current.ready % trainer.accumulate_grad_batches
        # A hook has added a parameter group, which the batch distributes.
        added = isinstance(phase, Fitting) and len(self.optimizers[0].param_groups) > len(
            phase.fit.optimizer.names
        )
        # The run may be unable to lose one more process.
        if continues or added or self._watch is None or self._watch.replaces is None:
            return
        # A fit that continues from a copy does not repeat an epoch's end, which saves files.
        if not copies.is_due(batches.total.ready) and batches.current.ready:
            return
        sharding = next((x for x in self.optimizers if hasattr(x, "consolidate_state_dict")), None)
        if sharding is not None or (not isinstance(phase, Fitting) and phase.left.optimizers):
            advice = "Train replicas (PiperStrategy('ddp'))"
            if sharding is not None:
                advice = f"{type(sharding).__name__} shards the state. Use its inner optimizer"
            raise PiperError(
                f"PiperStrategy(spares={self._spare_count}): the optimizer's state of an uncaptured step is sharded, so "
                f"a spare cannot get it. {advice}, or remove spares [PIPER-S002]"
            )
        copies.wait()
        self.on_train_end()  # reads the positions of loaders
        self._in_memory = True
        try:
            content = spares.content_of_checkpoint(trainer) | {BESIDE: []}
        finally:
            self._in_memory = False
        captured = isinstance(phase, Fitting)
        eager = None if captured else "it ran uncaptured when a process was lost"
        content[OUTSIDE] = spares.outside_checkpoint(trainer, gradients=not captured) | {EAGER: eager}
        content |= own_entry(seed=phase.left.seed, loaders=self._loaders.content(self._drawing))
        ranges, steady = list[TensorRange](), set[int]()  # an uncaptured step may change everything
        if isinstance(phase, Fitting):
            held = self._tensors_of(phase.fit)
            ranges, steady = self._own_ranges(phase.fit, held, content), held.steady_memory
        check_values(content)
        copies.keep(self.global_rank, content, ranges, batches.total.ready, steady)
        if captured and self.is_global_zero:
            assert self._spares is not None
            self._spares.prepare()

    def _own_ranges(self, fit: Fit, held: HeldTensors, content: dict[str, Any]) -> list[TensorRange]:
        """Return the ranges that this process copies into memory. Add to the content the names of tensors that the
        module's state dict does not have."""
        tensor_map = fit.ownership.tensor_map
        saved = {tensor_map.canonical.get(name, name) for name in content["state_dict"]}
        content[BESIDE] = [name for name in tensor_map.specs if name not in saved]
        copies = [] if self._averages is None else self._averages.ranges(content, held.written)
        return held.ranges + copies

    def _rounds_entry(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the state of local SGD for a checkpoint, complete on rank 0. It has the anchor and the outer
        optimizer's state, and the values of all local replicas except replica 0, which the checkpoint itself has.
        After a fit that ended within a round, the checkpoint itself has the mean of the replicas, and the state has
        the values of all replicas before the end. None without local SGD, or if the checkpoint has only weights.
        Collective."""
        if self._local_sgd is None or "optimizer_states" not in checkpoint:
            return None
        own, rounds = {key: checkpoint[key] for key in OF_REPLICA}, self.phase.left.rounds
        state: dict[str, Any] | None = self._restored.local_sgd
        # The first rank of a local replica has its whole values.
        firsts = range(0, self.world_size, self._program_size)
        is_first = self.global_rank in firsts
        if rounds is not None:
            module = own["state_dict"]
            changed = any(self.world.gather(is_first and rounds.has_changed(module)))
            state = rounds.state(module if changed else None)
            if rounds.ended_within and not changed:
                own["state_dict"] = rounds.before_end(module)
                state = state and {**state, "before_end": own["state_dict"]}
        sent = on_host(own) if is_first else None
        others = [self.world.move_object(sent, first, 0) for first in firsts[1:]]
        if state is None:
            return None
        return {**{key: value for key, value in state.items() if key != "first"}, "replicas": others}

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._saves.remove(self.checkpoint_io, filepath)


def _check_number(saved: int, here: int) -> None:
    """Check that a checkpoint has a state for each optimizer of the fit.

    Raises:
        PiperError: It has more or fewer states.
    """
    if saved != here:
        raise PiperError(
            f"the checkpoint holds the states of {counted(saved, 'optimizer')}, but this fit has {here}. Resume from a "
            f"checkpoint of a fit with {counted(here, 'optimizer')} [PIPER-K003]"
        )
