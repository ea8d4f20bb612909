"""The programs of a module's steps and their executors: one for each batch spec and Python state.

`Fit` has a store for the training step, and `Evaluation` has a store for all other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from lightning_piper.capture import BatchSpec, CapturedStep, History, capture
from lightning_piper.capture.python_state.rollback import rollback_on_failure
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.errors import CaptureError, LongStepError, PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.processes.world import World, described
from lightning_piper.session.checksums import checksum
from lightning_piper.session.process_runtime import Context, Prepared, ProcessRuntime, Settings
from lightning_piper.session.variants import Variants

MANY_SPECS = 16  # how many batch specs are traced without a warning
MANY_PROGRAMS = 256  # how many programs stay prepared
MANY_KEPT = 8  # how many captures `KeptCaptures` has
Step = tuple[str, int | None]  # a method of the module, and the index of its loader if there are several
TRAINING: Step = ("training_step", None)


class KeptCaptures:
    """The latest captures of the training step in this process, at most `MANY_KEPT`. A fit that continues after the loss
    of a process uses them."""

    def __init__(self) -> None:
        self._steps: list[CapturedStep] = []

    def add(self, step: CapturedStep) -> None:
        self._steps = [*(each for each in self._steps if each is not step), step][-MANY_KEPT:]

    def find(self, batch_spec: BatchSpec, context: Context) -> CapturedStep | None:
        """Return the latest capture for this batch and context that is still valid: the Python state and the module's
        tensors have not changed since. Return None if no capture is valid."""
        for step in reversed(self._steps):
            fits = (step.batch_spec.key, step.context) == (batch_spec.key, context)
            if fits and step.holds():
                return step
        return None


class Programs:
    """A store of programs. It compiles a module's step on the first use of a batch spec or a Python state.

    A batch that differs only in the sizes of its tensors reuses the same capture. Any other difference needs
    a new capture. The processes compile together. A spec describes the batch that one process draws. With
    replicas, the step's batch is larger.

    Attributes:
        traced: Whether the last call of `compile` traced the step.

    Args:
        module: The module whose steps the programs run; parts of it may be on other processes.
        runtime: The runtime on which the programs run.
        training: The training step's finished DAG, if that step determines how the module is distributed.
            Other steps need it then.
        instead: Compiles, in another way, a training step that cannot be captured, or raises the error that
            it receives.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: ProcessRuntime,
        settings: Settings,
        world: World,
        training: TrainingDAG | None = None,
        instead: Callable[[CaptureError, BatchSpec, History], Compiled] | None = None,
    ) -> None:
        self._module, self._runtime, self._settings, self._world, self._training = (
            module,
            runtime,
            settings,
            world,
            training,
        )
        self._instead = instead
        self._variants: dict[Step, Variants] = {}
        # (capture number, step, batch spec) -> program
        self._prepared: dict[tuple[int, Step, Hashable], Prepared] = {}
        # the last spec that `find` received, and its family
        self._last: tuple[BatchSpec | None, Hashable] = (None, None)
        # each step with the batch specs for which it was traced
        self._traced: set[tuple[Step, Hashable]] = set()
        self.traced = False
        self._kept: KeptCaptures | None = None
        # The kept capture for the first batch; None to make a new capture.
        self._reused: CapturedStep | None = None

    def reuse(self, kept: KeptCaptures, batch_spec: BatchSpec) -> None:
        """Keep captures of the training step. For the first batch, use a kept capture if all processes have the same
        one. Collective."""
        self._kept = kept
        found = kept.find(batch_spec.times(self._settings.replicas), self._settings.context)
        sums = self._world.gather(None if found is None else checksum(found.text))
        self._reused = found if len(set(sums)) == 1 else None

    def distributed_by(self, training: TrainingDAG) -> None:
        """From the next `compile` on, compile steps for a module that is distributed as this training DAG
        says."""
        self._training = training

    @property
    def compiled(self) -> list[Compiled]:
        """The captured programs: for each step, one for each kind of batch and each Python state."""
        return [compiled for variants in self._variants.values() for compiled in variants.programs]

    def variants(self, step: Step) -> Variants:
        """Return the captures of a step."""
        if step not in self._variants:
            self._variants[step] = Variants(
                step[0], lambda batch_spec, history: self._captured(step, batch_spec, history), self._world
            )
        return self._variants[step]

    def find(self, step: Step, batch_spec: BatchSpec, batch_idx: int) -> Compiled | None:
        """Return the capture that is valid for this batch and the current Python state; None if no capture is
        valid.

        Args:
            batch_idx: Index of the batch in its epoch.
        """
        variants = self.variants(step)
        variants.history.batch_idx, variants.history.batch = batch_idx, batch_spec
        if self._last[0] is not batch_spec:
            self._last = (batch_spec, _family(batch_spec))
        return variants.find(self._last[1])

    def prepared(self, step: Step, batch_spec: BatchSpec) -> Prepared | None:
        """Return the program that was prepared for this batch spec with the last capture that `find` returned
        for this step; None if there is none yet."""
        return self._prepared.get((self.variants(step).number, step, batch_spec.key))

    def compile(
        self,
        step: Step,
        batch_spec: BatchSpec,
        captured: Compiled | None,
        apart: bool = False,
        collective: bool = True,
        changed: CaptureError | None = None,
    ) -> Compiled:
        """Return the program for a batch of this spec. Compile it if it is not prepared yet. Set `traced`.
        Collective, unless `collective` is False.

        Args:
            captured: The result of `find`.
            apart: Whether replicas may have batches of different shapes.
            collective: Whether all processes take part. If not, other replicas continue without this one.
            changed: The error to raise if the step of this process has changed since its capture.

        Raises:
            PiperError: The step cannot be captured or compiled.
        """
        known = None if captured is None else self.prepared(step, batch_spec)

        def sized() -> Compiled:
            """Return the prepared program, or compile one, with a new capture if `captured` is None."""
            if changed is not None:
                raise changed
            if known is not None:
                return known.compiled
            try:
                if captured is None:
                    return self.variants(step).add(_family(batch_spec), batch_spec)
                with rollback_on_failure(self._module, step[0]):
                    return captured.shaped(
                        batch_spec.times(self._settings.replicas), self._settings.static, self._training
                    )
            except PiperError:
                raise
            except Exception as error:  # any error of the module's code, perhaps only raised under tracing
                failure = CaptureError(described(error))
                failure.raised = error
                raise failure from error

        before = 0 if captured is None else captured.step.traces
        compiled = self._runtime.compiled(sized, apart) if collective else self._runtime.compiled_here(sized)
        self.traced = compiled.step.traces > before
        if self.traced:
            self._count((step, batch_spec.key))
        return compiled

    def _count(self, spec: tuple[Step, Hashable]) -> None:
        """Count a batch spec for which a step was traced. If one step has many, warn once, because each later
        spec needs a trace."""
        seen = [other for other in self._traced if other[0] == spec[0]]
        if spec not in self._traced and len(seen) == MANY_SPECS:
            self._world.warn(
                f"batches had more than {MANY_SPECS} layouts (shapes of tensors, values of numbers and "
                "strings), and Piper captures the step again for each layout. Pad batches to a few shapes. "
                "Convert numbers of the batch to tensors, and remove values that the step does not use. If the "
                "step's Python code uses sizes as numbers (int(), range(), an index), use tensor operations "
                "instead [PIPER-W016]"
            )
        self._traced.add(spec)

    def prepare(self, step: Step, batch_spec: BatchSpec, compiled: Compiled) -> Prepared:
        """Prepare a compiled program for batches of this spec on the process runtime, which must be bound.
        Return the prepared program: the same object as before if this program was prepared already.
        Collective.

        If `MANY_PROGRAMS` are prepared, drop the one that was prepared first.
        """
        known = self.prepared(step, batch_spec)
        if known is not None and known.compiled is compiled:
            self._runtime.connect(compiled)
            return known
        if compiled.dag.forward_only or compiled.dag.code.metrics.events:
            # The code of this process's batch, whose return value and calls of metric objects each step repeats.
            compiled.step.at(batch_spec.size)
        prepared = self._runtime.prepare(compiled)
        if len(self._prepared) >= MANY_PROGRAMS:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[self.variants(step).number, step, batch_spec.key] = prepared
        return prepared

    def check_held(self) -> None:
        """Check that every process still holds the tensors that its programs work on.

        Raises:
            PiperError: A process does not hold a tensor.
        """
        for prepared in self._prepared.values():
            self._runtime.check_held(prepared.compiled)

    def clear(self) -> None:
        """Drop the executors.

        Executors hold communicators, whose threads are joined when the last reference disappears. If the
        garbage collector dropped this reference, it could do so in a forked process (a loader's worker), which does
        not have these threads.
        """
        self._prepared.clear()

    def _captured(self, step: Step, batch_spec: BatchSpec, history: History) -> Compiled:
        """Capture a step for a batch of this spec, and compile it. If a training step cannot be captured,
        return the result of `instead`. `history` has facts from earlier captures of the step.

        Raises:
            CaptureError: The step cannot be captured, and there is no `instead`, or the capture would take
                minutes (LongStepError).
            DirectiveError: A directive does not fit the step.
        """
        settings = self._settings
        context, (name, loader) = settings.context if step == TRAINING else settings.forward_context, step
        example = batch_spec.times(settings.replicas)
        device, norms = self._world.device, settings.whole_norms
        try:
            with rollback_on_failure(self._module, name):
                found, self._reused = self._reused, None
                if found is None:
                    found = capture(
                        self._module,
                        example,
                        device,
                        context,
                        name,
                        loader,
                        history=history,
                        whole_norms=norms,
                    )
                compiled = compile_step(
                    found, tuple(settings.program), None, settings.static, self._training, settings.device
                )
                if self._kept is not None and step == TRAINING:
                    self._kept.add(found)
                return compiled
        except CaptureError as error:
            if step != TRAINING or self._instead is None or isinstance(error, LongStepError):
                raise
            with rollback_on_failure(self._module, name):
                return self._instead(error, example, history)


def _family(batch_spec: BatchSpec) -> tuple[Any, ...]:
    """Return a key that is equal for specs that differ only in tensor sizes. If a batch cannot be cut, its
    key also contains the sizes."""
    if batch_spec.undivided is not None:
        return batch_spec.key
    return batch_spec.structure, tuple((len(spec.shape), spec.dtype) for spec in batch_spec.specs)
