"""`Evaluation`: runs `validation_step`, `test_step` and `predict_step` as forward-only plans, over the processes of a run.

A plan has fixed shapes and is the same for all processes of a replica, so they agree before each step that they have the same
batch, and whether a plan has to be made first. Replicas may have batches of different sizes, and some a batch more than others, if
the step logs no tensors: so they do in `predict`, where Lightning's sampler repeats no sample to make the local batches even. A
replica that has run out repeats its last batch, without a result, as long as others go on: they may need its shards of
parameters.
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

SEEDS = 2**61  # away from those of the training steps


class Evaluation:
    """Runs the steps of a module that have no backward pass.

    Attributes:
        runtime: on which the steps run.
        follow: called before each step: lets the tensors that it works on have the values that hooks may have put into the module.

    Args:
        module: whose steps are run; parts of it may be on other processes.
        runtime: bound to this process's tensors, or to be bound by `begin`.
        settings: of the compilation.
        seed: of random numbers that steps draw.
        training: the training step's DAG, if the module is distributed by it.
        begin: called with the first program, before it is run. Collective.
    """

    def __init__(
        self, module: nn.Module, runtime: ProcessRuntime, settings: Settings, world: World, seed: int,
        training: TrainingDAG | None = None, begin: Callable[[Compiled], None] | None = None,
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self._module, self._world, self._begin = module, world, begin
        self._seeds = itertools.count(seed ^ SEEDS)
        self._programs = Programs(module, runtime, settings, world, training)
        self.follow: Callable[[], None] = lambda: None
        self._steps = 0
        self._warned: set[Step] = set()
        self._batches: list[list[float]] = []  # of each process, of each of its loaders
        self._seen: Counter[int] = Counter()

    def check_held(self) -> None:
        """As in `Programs`."""
        self._programs.check_held()

    @property
    def programs(self) -> list[Compiled]:
        """What was compiled, one for each kind of step and batch."""
        return self._programs.compiled

    def captures(self, name: str) -> list[Compiled]:
        """Of a step."""
        return [compiled for compiled in self.programs if compiled.step.name == name]

    def close(self, failed: bool = False) -> None:
        """No steps are run any more, here or by others on its runtime. Collective, unless it failed."""
        self._programs.clear()
        self.runtime.close(failed)

    def expect(self, batches: Sequence[float]) -> None:
        """A prediction begins. Collective.

        Args:
            batches: in each loader of this process; infinite where the number is not known.
        """
        self._batches, self._seen = self._world.gather(list(batches)), Counter()

    def step(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """Run a step on a batch: logs what it logs, and returns what it returns, of the batch of this replica. Collective.

        Args:
            name: of the module's method.
            batch: on this process's device.
            batch_idx: which batch it is.
            dataloader_idx: where it is from; None where there is one loader.

        Raises:
            CaptureError, DirectiveError: the step cannot be captured, or placed.
            PiperError: the processes have batches that do not fit together.
        """
        # What is made here outlives the step: it must not be an inference tensor, which nothing could change afterwards.
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
        """After a batch that is the last one of this replica: how many more there are in others."""
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
        self.follow()
        programs, variants = self._programs, self._programs.variants(step)
        captured = programs.find(step, batch_spec, batch_idx)
        prepared, state = programs.prepared(step, batch_spec), variants.state(captured)
        lacking, apart = agree_on_batch(self._world, step, batch_spec, leaves, prepared is None, self._steps, state)
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
        variants.ran(prepared.compiled, first_of_epoch=batch_idx == 0)
        if step[0] == "predict_step" and self._world.count > 1 and prepared.compiled.dag.code.metrics.events:
            raise CaptureError(
                "predict_step uses metric objects, which replicas update together, and in prediction one replica may have a batch "
                "more than others; use them in validation_step or test_step"
            )
        if apart and prepared.replay.tensors and batch_spec.undivided is None:
            raise BatchError(
                f"the replicas have batches of different shapes in {step[0]}, which logs tensors, and small ones would count as "
                "much as large ones. Use a sampler that divides the data evenly (Lightning's own does), or log in on_..._epoch_end"
            )
        return prepared, self.runtime.run(prepared, prepared.compiled.step.inputs(leaves), next(self._seeds))
