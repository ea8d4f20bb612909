"""The phases of a strategy, from one run of the Trainer to the next, and the state in each.

The transitions are::

    Idle, Ended --setup--> Evaluating --teardown--> Idle
    Idle, Ended --setup--> Starting --first batch--> Fitting --teardown--> Ended
                           Starting --first batch--> Eager --teardown--> Idle  an uncaptured training step
                           Fitting --a later step--> Eager --teardown--> Idle  a step that cannot be captured
                           Starting --teardown--> Idle                         a fit without a batch
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from lightning_piper.batch_norms import plain_batch_norms
from lightning_piper.common.module_copies import end_copies
from lightning_piper.directives import replicas_of
from lightning_piper.directives.base import set_degrees
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.holdings.optimizer import (
    Names,
    ShardedOptimizer,
    State,
    check_groups,
    parameter_names_in,
    whole_parameter_names_in,
)
from lightning_piper.processes.batch_join import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.profile import Schedule, recording_of, requested_by
from lightning_piper.search.program_writer import Written
from lightning_piper.session.eager.eager_optimizer import EagerOptimizer, divided
from lightning_piper.session.eager.eager_replicas import EagerReplicas
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.evaluation import Evaluation
from lightning_piper.session.local_sgd import Rounds
from lightning_piper.session.program import AUTO
from lightning_piper.session.program_cache import ChosenProgram
from lightning_piper.strategy.fit import Fit


@dataclass(frozen=True)
class Left:
    """The state of the previous fit that checkpoints need.

    Attributes:
        seed: Seed of the random numbers of the fit's steps; None if there was no fit, or if its training step
            ran uncaptured.
        optimizers: Piper's objects that can assemble the full states of the Trainer's optimizers; empty if
            the Trainer's optimizers have their full states.
        state: The optimizer's state in canonical form; None if `optimizers` or the optimizer itself has the
            state. Set if the state came from a checkpoint and there was no batch, or if the strategy is a
            copy.
        rounds: The exchanges of local SGD; None without local SGD.
    """

    seed: int | None = None
    optimizers: tuple[ShardedOptimizer | EagerOptimizer, ...] = ()
    state: State | None = None
    rounds: Rounds | None = None

    def full_state(self, optimizer: Optimizer) -> State | None:
        """Return the full state of one of the Trainer's optimizers, as `ShardedOptimizer.full_state` does.
        None if `optimizers` has no object for the optimizer. Collective."""
        found = next((each for each in self.optimizers if each.optimizer is optimizer), None)
        return None if found is None else found.full_state()


@dataclass(frozen=True)
class Idle:
    """The phase without a run, or with a run that Lightning does alone: an evaluation with all devices in
    this process.

    All phases have the following attributes.

    Attributes:
        left: The state of the previous fit that checkpoints need.
        replicas: For each process, the replica that it draws data for, in this run or the previous run, such
            as `(0, 0, 1, 1)`. Empty if Lightning runs the steps alone, or before the first run. Then there is
            one replica.
        evaluation: Runs the steps that do not train; None if Lightning runs them.
    """

    left: Left = Left()
    replicas: tuple[int, ...] = ()
    evaluation: None = None


@dataclass(frozen=True)
class Evaluating:
    """The phase of `validate`, `test` or `predict` over processes, or on a simulated accelerator.

    Attributes:
        standalone: The owner of the module, which runs the steps.
    """

    standalone: Standalone
    left: Left

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.standalone.world.replicas

    @property
    def evaluation(self) -> Evaluation:
        return self.standalone.evaluation

    def close(self, failed: bool) -> None:
        self.standalone.end(failed)


@dataclass
class Starting:
    """The phase of a fit up to its first batch. Hooks may still change the module and its optimizer.

    The module and the optimizer are whole, except during a sanity check.

    Attributes:
        standalone: The owner of the module.
        names: Names of the optimizer's parameters; empty if `eager` is set.
        resumes: Whether the optimizer has its state from a checkpoint already.
        later: The state from a checkpoint that the optimizer receives at the first batch; None without such
            a state.
        eager: Why the training step cannot be captured; None if a capture may succeed.
        searches: Whether to search for a program at the first batch.
        replicas_alone: The owner of the module under data parallelism, before a searched program replaced it;
            None without a searched program.
        kept: The file that keeps the searched program; None without a file.
    """

    standalone: Standalone
    names: Names = field(default_factory=list)
    resumes: bool = False
    later: State | None = None
    eager: str | None = None
    searches: bool = False
    replicas_alone: Standalone | None = None
    kept: Path | None = None

    @property
    def left(self) -> Left:
        return Left(self.standalone.seed, state=self.later)

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.standalone.world.replicas

    @property
    def evaluation(self) -> Evaluation | None:
        return None if self.eager or not self.standalone.settings.evaluates else self.standalone.evaluation

    @property
    def unsearched(self) -> Standalone:
        """The owner of the module under the program from before the search; without a searched program, this
        is `standalone`."""
        return self.replicas_alone or self.standalone

    def take_over(
        self, choice: ChosenProgram, world_of: Callable[[tuple[int, ...]], World], tags: contextlib.ExitStack
    ) -> BatchJoin | None:
        """Replace the program by a searched program. Collective.

        Args:
            choice: The searched program.
            world_of: Maps the replica of each process to a `World`.
            tags: Receives the callbacks that remove the stages' tags.

        Returns:
            The join of the batches of processes that work on one batch; None if each process works on its own
                batch.
        """
        before, written = self.standalone, choice.written
        for directive in written.directives:
            set_degrees(directive, repr(AUTO))
        end_copies(before.module)
        found, self.kept = replicas_of(written.directives), choice.file
        for handle in written.annotate(before.module):
            tags.callback(handle.remove)
        world = world_of(tuple(found.get(rank, 0) for rank in range(before.world.size)))
        settings = dataclasses.replace(before.settings, program=written.directives, replicas=world.count)
        self.standalone, self.replicas_alone = before.under(settings, world), before
        return BatchJoin(world) if world.count < world.size else None

    def write(self, written: Callable[[], Written], tags: contextlib.ExitStack) -> None:
        """Replace the program by directives that follow from degrees, the module and a batch. Collective.

        Args:
            written: Returns the directives and annotations. Only rank 0 calls it.
            tags: Receives the callbacks that remove the stages' tags.
        """
        found = self.standalone.world.on_rank_zero(written)
        assert found is not None
        end_copies(self.standalone.module)
        for handle in found.annotate(self.standalone.module):
            tags.callback(handle.remove)
        settings = dataclasses.replace(self.standalone.settings, program=found.directives)
        self.standalone = self.standalone.under(settings, self.standalone.world)

    def give_back(self, tags: contextlib.ExitStack, say: Callable[[str], None]) -> BatchJoin | None:
        """If a searched program has replaced the earlier program, return to the earlier program. Then delete
        the file of the searched program, which cannot run. Call `say` with a message, and close `tags`.
        Without a searched program, do nothing.

        Returns:
            Always None: the new value for the strategy's `_join`, because batches are no longer joined.
        """
        before, self.replicas_alone = self.replicas_alone, None
        if before is not None:
            say("PiperStrategy drops the program that it chose and uses data parallelism")
            self.forget()
            tags.close()
            self.standalone = self.standalone.under(before.settings, before.world)
        return None

    def forget(self) -> None:
        """On rank 0, delete the file of a searched program that cannot run, so that the next fit does not
        choose it again. Without such a file, do nothing."""
        if self.kept is not None and self.standalone.world.is_rank_zero:
            self.kept.unlink(missing_ok=True)

    def load(self, state: State, optimizer: Optimizer, module: nn.Module, in_ranges: bool) -> None:
        """Load an optimizer's state from a checkpoint. The optimizer gets the state immediately, so that
        hooks can read and change it. If the processes read the state in ranges (`in_ranges`), or the module is on
        the meta device, the optimizer gets only the parameter groups now, and the full state at the first batch.

        Raises:
            PiperError: The state has different parameter groups.
        """
        self.names = parameter_names_in(optimizer, module, self.names)
        check_groups(self.names, state)
        self.resumes = not in_ranges and not is_on_meta(module)
        self.later = None if self.resumes else state
        optimizer.load_state_dict(state if self.resumes else {**state, "state": {}})

    def resumed(self, optimizer: Optimizer) -> State | None:
        """Return the optimizer's state at the beginning of the fit. None without a checkpoint, or if the
        optimizer already has the state and shards it itself (`ZeroRedundancyOptimizer`)."""
        if self.resumes and hasattr(optimizer, "consolidate_state_dict"):
            return None
        return optimizer.state_dict() if self.resumes else self.later

    def close(self, failed: bool) -> None:
        self.standalone.end(failed)


@dataclass(frozen=True)
class _OfFit:
    """Base of the phases that have a `Fit`.

    Attributes:
        rounds: The exchanges of local SGD; None without local SGD.
    """

    fit: Fit
    rounds: Rounds | None = field(default=None, kw_only=True)

    @property
    def left(self) -> Left:
        return Left(self.fit.seed, (self.fit.optimizer,), rounds=self.rounds)

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.fit.world.replicas


@dataclass(frozen=True)
class Fitting(_OfFit):
    """The phase of a fit from its first batch on. The module is distributed.

    Attributes:
        start: The phase before the first batch.
    """

    start: Starting

    @property
    def standalone(self) -> Standalone:
        return self.fit.before

    @property
    def evaluation(self) -> Evaluation | None:
        return self.fit.evaluation

    def close(self, failed: bool) -> None:
        if self.rounds is not None and not failed:
            self.rounds.end()
        self.fit.close(failed)


@dataclass(frozen=True)
class Ended(_OfFit):
    """The phase after a fit, whether it failed or not. The result of the fit can still be saved."""

    evaluation: None = None


@dataclass
class Eager:
    """The phase of a fit, from its first batch on, whose training step is not captured. Lightning runs the
    step. With several processes, Piper averages gradients, copies rank 0's buffers to all replicas, and
    divides optimizer states if the program shards them.

    Attributes:
        before: The owner of the module before the first batch.
        over: Averages gradients over the replicas; None if there is one process.
        named: Optimizers with the names of their parameters. `arrive` divides the states of these optimizers
            over the replicas and empties `named`.
        optimizers: Optimizers whose state is divided.
    """

    before: Standalone
    over: EagerReplicas | None
    named: Sequence[tuple[Optimizer, Names]] = ()
    optimizers: tuple[EagerOptimizer, ...] = ()
    evaluation: None = None
    _one_pass: bool = False  # whether `after_pass` must switch averaging off

    @classmethod
    def begin(cls, before: Standalone, optimizers: Sequence[Optimizer]) -> Eager:
        """Make each process a replica of the whole module. With one process, only move the module to its
        device. Collective."""
        before.close(failed=False)
        if before.world.size == 1:
            before.module.to(before.world.device)
            return cls(before, None)
        named = [(optimizer, parameter_names_in(optimizer, before.module)) for optimizer in optimizers]
        return cls(before, EagerReplicas(before.module, before), named)

    def record(self, profile: Schedule | bool | None, trainer: pl.Trainer) -> None:
        """Record the steps that the strategy's argument or the Trainer's profiler selects. Collective.

        On one device, an uncaptured step does not have a plan to record. Warn if there is such a request.
        """
        if self.over is not None:
            self.over.recording = recording_of(profile, trainer, self.before.world, None)
        elif (requested := requested_by(profile, trainer)) is not None:
            self.before.world.warn(
                f"{requested} records plans, but an uncaptured step on one device has no plan. So nothing is "
                f"recorded. Use a profiler of Lightning instead of {requested} [PIPER-W003]"
            )

    def arrive(self) -> None:
        """Prepare for the next batch, when no optimizer is in the middle of a step. Collective.

        All replicas get rank 0's buffers. The states of new optimizers, and of optimizers whose parameter
        groups have changed, are divided over the replicas.
        """
        self.share_buffers()
        changed = [each for each in self.optimizers if each.has_changed]
        for each in changed:
            each.end()
        if changed:
            self.optimizers = tuple(each for each in self.optimizers if each not in changed)
            self.named = [
                (each.optimizer, whole_parameter_names_in(each.optimizer, self.before.module))
                for each in changed
            ]
        if self.named:
            self.optimizers += divided(self.before, self.named)
            self.named = ()

    @property
    def left(self) -> Left:
        return Left(optimizers=self.optimizers)  # Lightning writes all other entries of its checkpoints

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.before.world.replicas

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all replicas. Collective."""
        if self.over is not None:
            self.over.share_buffers()

    def average(self, last: bool = True) -> None:
        """Make every backward pass leave the mean of all replicas' gradients, until `stop_averaging`. See
        `EagerReplicas.average`."""
        if self.over is not None:
            self.over.average(last)

    def stop_averaging(self) -> None:
        if self.over is not None:
            self.over.stop_averaging()

    def before_pass(self, last: bool) -> None:
        """Prepare for a backward pass that Lightning starts.

        If averaging is off and there are several processes, this method switches averaging on, and
        `after_pass` switches it off. So it also works for a pass that a hook starts outside of a step. During
        a manual step, averaging is on already.
        """
        self._one_pass = self.over is not None and not self.over.averages
        if self._one_pass:
            self.average(last)

    def after_pass(self) -> None:
        if self._one_pass:
            self.stop_averaging()

    def batch_norms(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the training step in which `nn.SyncBatchNorm`, or all batch norms, use the
        statistics of all replicas' samples. With one process, the statistics are of its own samples."""
        return plain_batch_norms() if self.over is None else self.over.batch_norms()

    def load(self, optimizer: Optimizer, state: State) -> None:
        """Load an optimizer's state from a checkpoint. If the state is divided over the replicas, each
        process keeps its own part."""
        found = next((each for each in self.optimizers if each.optimizer is optimizer), optimizer)
        load = found.load_full_state if isinstance(found, EagerOptimizer) else found.load_state_dict
        load(state)

    def close(self, failed: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.close(failed)
        if self.over is not None:
            self.over.close(failed)


Phase = Idle | Evaluating | Starting | Fitting | Eager | Ended


def over(phase: Phase) -> Idle | Ended:
    """Return the phase that follows when the run is over."""
    if isinstance(phase, Fitting):
        return Ended(phase.fit, rounds=phase.rounds)
    return phase if isinstance(phase, Idle | Ended) else Idle(phase.left, phase.replicas)


def copied(phase: Phase, processes: int) -> Idle:
    """Return the phase of a copy of the strategy (`copy.deepcopy(trainer)`, `pickle.dumps(trainer)`).

    The phase has everything that a later fit needs, without the plans and connections of a run, which belong
    to this process. It has the optimizer's state as one device would have it, so that the copy of the
    strategy can save it.

    Raises:
        PiperError: The state is divided over several processes.
    """
    left = phase.left
    if not left.optimizers:
        return Idle(left, phase.replicas)
    if processes > 1:
        raise PiperError(
            "PiperStrategy: a Trainer cannot be copied after a fit over several processes, because the "
            "optimizer's state may be divided over them. Copy it before the fit, or save a "
            "checkpoint and load it into a new Trainer [PIPER-S002]"
        )
    # A single process has only `ShardedOptimizer`s here, never an `EagerOptimizer`.
    return Idle(Left(left.seed, state=left.optimizers[0].full_state()), phase.replicas)
