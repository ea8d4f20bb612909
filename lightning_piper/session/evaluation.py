"""`Evaluation`: runs `validation_step`, `test_step` and `predict_step` as forward-only plans on the processes
of a run.

A plan has fixed shapes and is the same for all processes of a replica. So before each step the processes
agree that they have the same batch, and whether a plan must be compiled first. If the step logs no tensors,
replicas may have batches of different sizes, and some may have one batch more than other replicas. This
happens in `predict`, where Lightning's sampler does not repeat samples to make the local batches equal. A
replica that has run out of batches repeats its last batch, without a result, until the other replicas are
done. The reason is that the other replicas may need its shards of parameters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import BatchSpec, flatten
from lightning_piper.compiler import Compiled
from lightning_piper.errors import BatchError, CaptureError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.processes.agreement import agree_on_batch
from lightning_piper.processes.world import World
from lightning_piper.runtime import StepResult
from lightning_piper.session.process_runtime import Prepared, ProcessRuntime, Settings
from lightning_piper.session.programs import Programs, Step
from lightning_piper.session.replay import Given
from lightning_piper.session.verification import unlike_one_device

SEEDS = 2**61  # Makes the seeds of evaluation steps different from the seeds of training steps.


class Evaluation:
    """A runner of the steps of a module that do not have a backward pass.

    Attributes:
        runtime: The runtime on which the steps run.
        follow: Called before each step. The function updates the step's tensors with values that hooks may
            have put into the module.

    Args:
        module: The module whose steps run; parts of it may be on other processes.
        runtime: A runtime bound to this process's tensors, or a runtime that `begin` binds.
        seed: Seed of the random numbers that steps draw.
        training: The training step's DAG, if it determines how the module is distributed.
        begin: Called with the first program before it runs. Collective.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: ProcessRuntime,
        settings: Settings,
        world: World,
        seed: int,
        training: TrainingDAG | None = None,
        begin: Callable[[Compiled], None] | None = None,
    ) -> None:
        self.runtime = runtime
        self._module, self._world, self._begin = module, world, begin
        self._seeds = itertools.count(seed ^ SEEDS)
        self._programs = Programs(module, runtime, settings, world, training)
        self.follow: Callable[[], None] = lambda: None
        self._steps = 0  # number of runs so far
        self._warned: set[Step] = set()  # steps whose visible differences from one device were checked
        # for each process, the number of batches in each of its loaders
        self._batches: list[list[float]] = []
        self._seen: Counter[int] = Counter()  # index of a loader -> batches of this process so far

    def check_held(self) -> None:
        """Check that each process still holds the tensors that the compiled programs work on.

        Raises:
            PiperError: A process does not hold a tensor.
        """
        self._programs.check_held()

    @property
    def programs(self) -> list[Compiled]:
        """The captured programs: for each step, one for each kind of batch and each Python state."""
        return self._programs.compiled

    def captures(self, name: str) -> list[Compiled]:
        """Return the captured programs of one step, for all data loaders. Empty if the step was not
        captured."""
        return [compiled for compiled in self.programs if compiled.step.name == name]

    def close(self, failed: bool = False) -> None:
        """Drop the programs and release the communicators. Collective, unless the run failed."""
        self._programs.clear()
        self.runtime.close(failed)

    def set_batch_counts(self, batches: Sequence[float]) -> None:
        """Record the number of batches at the start of a prediction. Collective.

        Args:
            batches: For each loader of this process, its number of batches; infinite if the number is not
                known.
        """
        self._batches, self._seen = self._world.gather(list(batches)), Counter()

    def step(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """Run a step on a batch, log what the step logs, and return its result for this replica's batch.
        Collective.

        Args:
            name: Name of the module's method.
            batch: The batch, on this process's device.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the batch's loader; None if there is one loader.

        Raises:
            CaptureError: The step cannot be captured.
            DirectiveError: The directives do not fit the step.
            PiperError: The processes have batches that do not fit together.
        """
        # Tensors made here outlive the step. They must not be inference tensors, which cannot be changed in
        # place later.
        with torch.inference_mode(False), torch.no_grad():
            leaves, batch_spec = flatten(batch)
            step = (name, dataloader_idx)
            prepared, result = self._run(step, leaves, batch_spec, batch_idx)
            for _ in range(self._missing(dataloader_idx or 0)):
                self._run(step, leaves, batch_spec, batch_idx)
        given = Given(batch_spec, leaves)
        prepared.replay(self._module, result, given)
        code = prepared.compiled.step.at(batch_spec.size)
        assert code.rebuild is not None
        returned = [result.results[str(i)] for i in range(sum(name.isdecimal() for name in result.results))]
        return code.rebuild.and_keep(returned, given)

    def _missing(self, dataloader_idx: int) -> int:
        """Count a batch of this replica. If it is the replica's last batch of a prediction, return how many
        more batches the replica with the most batches has. Otherwise, or if a replica does not know its
        number of batches, return 0."""
        if not self._batches:
            return 0
        self._seen[dataloader_idx] += 1
        of_all = [found[dataloader_idx] for found in self._batches]
        if self._seen[dataloader_idx] < of_all[self._world.rank] or max(of_all) == float("inf"):
            return 0
        return int(max(of_all)) - self._seen[dataloader_idx]

    def _run(
        self, step: Step, leaves: Sequence[torch.Tensor], batch_spec: BatchSpec, batch_idx: int
    ) -> tuple[Prepared, StepResult]:
        """Run a step on a batch. Before the run, the processes agree on the batch, and compile a program if
        one is missing. Return the program and the result of the run. Collective.

        Raises:
            PiperError: As `step` says. The error is a BatchError if the step logs tensors and the replicas'
                batches have different shapes.
        """
        self.follow()
        programs, variants = self._programs, self._programs.variants(step)
        captured = programs.find(step, batch_spec, batch_idx)
        prepared, state = programs.prepared(step, batch_spec), variants.state(captured)
        lacking, apart = agree_on_batch(
            self._world, step, batch_spec, leaves, prepared is None, self._steps, state
        )
        self._steps += 1
        if lacking:
            compiled = programs.compile(step, batch_spec, captured, apart)
            if step not in self._warned:
                self._warned.add(step)
                for text in unlike_one_device(compiled):
                    self._world.warn(text)
            if self._begin is not None:
                self._begin(compiled)
                self._begin = None
            prepared = programs.prepare(step, batch_spec, compiled)
        assert prepared is not None
        if (changed := variants.ran(prepared.compiled, first_of_epoch=batch_idx == 0)) is not None:
            changed.late = True  # other processes may continue
            raise changed
        if step[0] == "predict_step" and self._world.count > 1 and prepared.compiled.dag.code.metrics.events:
            raise CaptureError(
                "predict_step uses metric objects. Replicas update metric objects together, but in "
                "prediction one replica may have one batch more than the other replicas. Use metric objects "
                "in validation_step or test_step [PIPER-C008]"
            )
        if apart and prepared.replay.tensors and batch_spec.undivided is None:
            raise BatchError(
                f"the replicas have batches of different shapes in {step[0]}, which logs tensors, but Piper takes "
                "their mean with one weight for each replica. Pad the batches to one shape, and give all replicas "
                "the same number of samples [PIPER-L004]"
            )
        return prepared, self.runtime.run(prepared, prepared.compiled.step.inputs(leaves), next(self._seeds))
