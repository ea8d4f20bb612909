"""The phases of a strategy, from one run of the Trainer to the next, and what there is in each.

Idle, Ended --setup--> Evaluating --teardown--> Idle
Idle, Ended --setup--> Starting --first batch--> Fitting --teardown--> Ended
                       Starting --first batch--> Eager --teardown--> Idle  a training step that runs as it is
                       Fitting --a later step--> Eager --teardown--> Idle  one that has become such a step
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
from lightning_piper.checkpoint.state import referenced
from lightning_piper.directives import replicas_of
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialize import is_on_meta
from lightning_piper.holdings.optimizer import Names, ShardedOptimizer, State, check_groups, names_in, whole_names_in
from lightning_piper.processes.joining import BatchJoin
from lightning_piper.processes.world import World
from lightning_piper.profile import Schedule, recording_of
from lightning_piper.search.writing import Written
from lightning_piper.session.cached import Choice
from lightning_piper.session.eager_optimizer import EagerOptimizer, divided
from lightning_piper.session.eager_replicas import EagerReplicas
from lightning_piper.session.evaluation import Evaluation
from lightning_piper.session.standalone import Standalone
from lightning_piper.strategy.fit import Fit


@dataclass(frozen=True)
class Left:
    """What the last fit has left for checkpoints.

    Attributes:
        seed: of its steps' random numbers; None if there was none.
        optimizers: the Trainer's, cut down to what this process holds.
        state: of the optimizer, in canonical form, if the optimizer has not got it: it came from a checkpoint, and there was no
            batch, or it went into a copy.
    """

    seed: int | None = None
    optimizers: tuple[ShardedOptimizer | EagerOptimizer, ...] = ()
    state: State | None = None

    def full_state(self, optimizer: Optimizer) -> State | None:
        """As in `ShardedOptimizer`; None of an optimizer that is whole. Collective."""
        found = next((each for each in self.optimizers if each.optimizer is optimizer), None)
        return None if found is None else found.full_state()


@dataclass(frozen=True)
class Idle:
    """No run, or one that Lightning does alone: an evaluation with all devices in this process.

    Attributes, here and in the others:
        left: for checkpoints.
        replicas: of each process, where processes draw the data of several; that of the last run.
        evaluation: runs the steps that do not train; None where Lightning does.
    """

    left: Left = Left()
    replicas: tuple[int, ...] = ()
    evaluation: None = None


@dataclass(frozen=True)
class Evaluating:
    """`validate`, `test` or `predict` over processes."""

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
    """A fit up to its first batch: hooks may still change the module and its optimizer, which are whole but for a sanity check.

    Attributes:
        names: of the optimizer's parameters.
        resumes: the optimizer has its state from a checkpoint.
        later: the state from a checkpoint that it gets when the first batch has come.
        eager: the training step is known to run as it is.
        searches: the first batch brings a program.
        replicas_alone: had the module before a searched program took over.
        kept: the file that this program is kept in.
    """

    standalone: Standalone
    names: Names = field(default_factory=list)
    resumes: bool = False
    later: State | None = None
    eager: bool = False
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
        """The module under the program that there is without a search."""
        return self.replicas_alone or self.standalone

    def take_over(
        self, choice: Choice, world_of: Callable[[tuple[int, ...]], World], tags: contextlib.ExitStack
    ) -> BatchJoin | None:  # fmt: skip
        """Go on under a program that was searched. Returns what joins the batches of processes that work on one. Collective.

        Args:
            world_of: the processes, by the replicas that they are parts of.
            tags: gets what takes the stages' tags away again.
        """
        before, written = self.standalone, choice.written
        found, self.kept = replicas_of(written.directives), choice.file
        for handle in written.annotate(before.module):
            tags.callback(handle.remove)
        world = world_of(tuple(found.get(rank, 0) for rank in range(before.world.size)))
        settings = dataclasses.replace(before.settings, program=written.directives, replicas=world.count)
        self.standalone, self.replicas_alone = before.under(settings, world), before
        return BatchJoin(world) if world.count < world.size else None

    def write(self, written: Callable[[], Written], tags: contextlib.ExitStack) -> None:
        """Go on under the directives of the degrees that were given, now that the module and a batch are known. Collective.

        Args:
            written: makes them.
            tags: gets what takes the stages' tags away again.
        """
        found = self.standalone.world.on_rank_zero(written)
        assert found is not None
        for handle in found.annotate(self.standalone.module):
            tags.callback(handle.remove)
        settings = dataclasses.replace(self.standalone.settings, program=found.directives)
        self.standalone = self.standalone.under(settings, self.standalone.world)

    def give_back(self, tags: contextlib.ExitStack, say: Callable[[str], None]) -> BatchJoin | None:
        """If a searched program has taken over, go on without it, for it cannot run. Then nothing joins batches."""
        before, self.replicas_alone = self.replicas_alone, None
        if before is not None:
            say("PiperStrategy gives up the program that it chose, so the processes are replicas")
            self.forget()
            tags.close()
            self.standalone = self.standalone.under(before.settings, before.world)
        return None

    def forget(self) -> None:
        """A searched program cannot run, so the next fit does not choose it again."""
        if self.kept is not None and self.standalone.world.is_rank_zero:
            self.kept.unlink(missing_ok=True)

    def load(self, state: State, optimizer: Optimizer, module: nn.Module) -> None:
        """Take over an optimizer's state from a checkpoint: at once if that can be, for hooks may look at it and change it.

        Raises:
            PiperError: it is of other parameter groups.
        """
        self.names = names_in(optimizer, module, self.names)
        check_groups(self.names, state["param_groups"])
        self.resumes = not referenced(state) and not is_on_meta(module)
        self.later = None if self.resumes else state
        optimizer.load_state_dict(state if self.resumes else {**state, "state": {}})

    def resumed(self, optimizer: Optimizer) -> State | None:
        """The state that the optimizer begins with; None if nothing is resumed."""
        return optimizer.state_dict() if self.resumes else self.later

    def close(self, failed: bool) -> None:
        self.standalone.end(failed)


@dataclass(frozen=True)
class _OfFit:
    """A phase in which there is a fit, with what it leaves."""

    fit: Fit

    @property
    def left(self) -> Left:
        return Left(self.fit.seed, (self.fit.optimizer,))

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.fit.world.replicas


@dataclass(frozen=True)
class Fitting(_OfFit):
    """A fit from its first batch on: the module is distributed.

    Attributes:
        start: how it was until then.
    """

    start: Starting

    @property
    def standalone(self) -> Standalone:
        return self.fit.before

    @property
    def evaluation(self) -> Evaluation | None:
        return self.fit.evaluation

    def close(self, failed: bool) -> None:
        self.fit.close(failed)


@dataclass(frozen=True)
class Ended(_OfFit):
    """A fit is over, well or not; what it has trained can be saved."""

    evaluation: None = None


@dataclass
class Eager:
    """A fit, from its first batch on, whose training step is not captured. What else it does is Lightning's to do.

    Attributes:
        over: averages gradients, where there are several processes.
        named: optimizers with the names of their parameters, until their state is divided over the replicas.
        optimizers: whose state is.
    """

    before: Standalone
    over: EagerReplicas | None
    named: Sequence[tuple[Optimizer, Names]] = ()
    optimizers: tuple[EagerOptimizer, ...] = ()
    evaluation: None = None
    _one_pass: bool = False

    @classmethod
    def begin(cls, before: Standalone, optimizers: Sequence[Optimizer]) -> Eager:
        """Distribute the module over the replicas. Collective."""
        before.close(failed=False)
        if before.world.size == 1:
            before.module.to(before.world.device)
            return cls(before, None)
        named = [(optimizer, names_in(optimizer, before.module)) for optimizer in optimizers]
        return cls(before, EagerReplicas(before.module, before), named)

    def record(self, profile: Schedule | bool | None, trainer: pl.Trainer) -> None:
        """Record the passes that the strategy's argument or the Trainer's profiler asks for. Collective."""
        if self.over is not None:
            self.over.recording = recording_of(profile, trainer, self.before.world, None)
        elif profile:
            self.before.world.warn("PiperStrategy(profile=...) records plans, and on one device a step that runs as it is has none")

    def arrive(self) -> None:
        """A batch is next, and no optimizer is in the middle of a step. Collective."""
        self.share_buffers()
        changed = [each for each in self.optimizers if each.has_changed]
        for each in changed:
            each.end()
        if changed:
            self.optimizers = tuple(each for each in self.optimizers if each not in changed)
            self.named = [(each.optimizer, whole_names_in(each.optimizer, self.before.module)) for each in changed]
        if self.named:
            self.optimizers += divided(self.before, self.named)
            self.named = ()

    @property
    def left(self) -> Left:
        return Left(optimizers=self.optimizers)  # the rest of its checkpoints is Lightning's own

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.before.world.replicas

    def share_buffers(self) -> None:
        """All replicas go on with rank 0's buffers. Collective."""
        if self.over is not None:
            self.over.share_buffers()

    def average(self, last: bool = True) -> None:
        """From now on backward passes leave the mean of all replicas' gradients; see `EagerReplicas.average`."""
        if self.over is not None:
            self.over.average(last)

    def stop_averaging(self) -> None:
        if self.over is not None:
            self.over.stop_averaging()

    def before_pass(self, last: bool) -> None:
        """A backward pass begins that Lightning knows of. Those of a manual step are averaged all along, others one by one: also
        where a hook makes them, outside of a step."""
        self._one_pass = self.over is not None and not self.over.averages
        if self._one_pass:
            self.average(last)

    def after_pass(self) -> None:
        if self._one_pass:
            self.stop_averaging()

    def batch_norms(self) -> contextlib.AbstractContextManager[None]:
        """Around the training step: `nn.SyncBatchNorm`, or all batch norms, take the statistics of all replicas' samples."""
        return plain_batch_norms() if self.over is None else self.over.batch_norms()

    def load(self, optimizer: Optimizer, state: State) -> None:
        """Take over an optimizer's state from a checkpoint."""
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
    """What follows when the run is over."""
    if isinstance(phase, Fitting):
        return Ended(phase.fit)
    return phase if isinstance(phase, Idle | Ended) else Idle(phase.left, phase.replicas)


def copied(phase: Phase, processes: int) -> Idle:
    """What of a phase goes into a copy (`copy.deepcopy(trainer)`, `pickle.dumps(trainer)`): all that a next fit needs, without the
    plans and connections of a run, which are of this process alone. The optimizer's state is there as one device would have it, so
    that the copy can be saved.

    Raises:
        PiperError: the state is in several processes.
    """
    left = phase.left
    if not left.optimizers:
        return Idle(left, phase.replicas)
    if processes > 1:
        raise PiperError(
            "PiperStrategy: a Trainer cannot be copied after a fit over processes, of which each has a part of the optimizer's "
            "state; copy it before, or save a checkpoint and load it into a new one"
        )
    return Idle(Left(left.seed, state=left.optimizers[0].full_state()), phase.replicas)  # of one process, which is never eager
