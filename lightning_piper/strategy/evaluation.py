"""`Evaluation`: runs `validation_step`, `test_step` and `predict_step` as forward-only plans, over the processes of a run.

A plan has fixed shapes and is the same for all processes of a replica, so they agree before each step that they have the same
batch, and whether a plan has to be made first. Replicas may have batches of different sizes, and some a batch more than others, if
the step logs no tensors: so they do in `predict`, where Lightning's sampler repeats no sample to make the shares even. A replica
that has run out goes through its last batch again, for nothing, as long as others go on: they may need its shards of parameters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_piper.capture import BatchLayout, History, capture, flatten
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.runtime import StepResult
from lightning_piper.strategy.agreement import agree_on_batch, draw_seed
from lightning_piper.strategy.engine import family, warn_of_many_layouts
from lightning_piper.strategy.identities import Identities
from lightning_piper.strategy.machine import Context, Machine, Prepared, Settings
from lightning_piper.strategy.materialize import Known, is_on_meta, materialize, places_of, tensor_at
from lightning_piper.strategy.ownership import UNREAD, Ownership, parts_of
from lightning_piper.strategy.suspension import check_devices, resume, suspend
from lightning_piper.strategy.variants import Variants
from lightning_piper.strategy.world import World

SEEDS = 2**61  # away from those of the training steps


class Evaluation:
    """Attributes:
    machine: on which the steps run.
    follow: called before each step: lets the tensors that it works on have the values that hooks may have put into the module.

    Args:
        module: whose steps are run; parts of it may be on other processes.
        machine: bound to this process's tensors, or to be bound by `begin`.
        settings: of the compilation; the context is that of each step.
        seed: of random numbers that steps draw.
        training: the training step's DAG, if the module is distributed by it.
        begin: called with the first program, before it is run. Collective.
    """

    def __init__(
        self, module: pl.LightningModule, machine: Machine, settings: Settings, world: World, seed: int,
        training: TrainingDAG | None = None, begin: Callable[[Compiled], None] | None = None,
    ) -> None:  # fmt: skip
        self.machine = machine
        self._module, self._settings, self._world, self._training, self._begin = module, settings, world, training, begin
        self._seeds = itertools.count(seed ^ SEEDS)
        self._variants: dict[tuple[str, int | None], Variants] = {}  # by method and loader
        self._prepared: dict[tuple[int, Hashable], Prepared] = {}  # by number of the capture, and by step and layout
        self.follow: Callable[[], None] = lambda: None
        self._steps = 0
        self._batches: list[list[float]] = []  # of each process, of each of its loaders
        self._seen: Counter[int] = Counter()

    @property
    def programs(self) -> list[Compiled]:
        """What was compiled, one for each kind of step and batch."""
        return [program for variants in self._variants.values() for program in variants.programs]

    def expect(self, batches: Sequence[float]) -> None:
        """A prediction begins. Collective.

        Args:
            batches: in each loader of this process; infinite where nobody knows.
        """
        self._batches, self._seen = self._world.gather(list(batches)), Counter()

    def step(self, name: str, context: Context, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """Run a step on a batch: logs what it logs, and returns what it returns, of the batch of this replica. Collective.

        Args:
            name: of the module's method.
            context: entered around it while it is captured.
            batch: on this process's device.
            batch_idx: which batch it is.
            dataloader_idx: where it is from; None where there is one loader.

        Raises:
            CaptureError, DirectiveError: the step cannot be captured, or placed.
            PiperError: the processes have batches that do not fit together.
        """
        # What is made here outlives the step: it must not be an inference tensor, which nothing could change afterwards.
        with torch.inference_mode(False), torch.no_grad():
            leaves, layout = flatten(batch)
            variants = self._captures(name, context, dataloader_idx)
            variants.history.batch_idx = batch_idx
            prepared, result = self._run(variants, name, leaves, layout, dataloader_idx)
            for _ in range(self._missing(dataloader_idx or 0)):
                self._run(variants, name, leaves, layout, dataloader_idx)
        prepared.replay(self._module, result.metrics)
        rebuild = prepared.compiled.step.at(layout.size).rebuild
        assert rebuild is not None
        lists = layout.contents(leaves)
        return rebuild([result.results[str(i)] for i in range(len(result.results))], lambda listed: lists[listed.index])

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
        self, variants: Variants, name: str, leaves: Sequence[torch.Tensor], layout: BatchLayout, dataloader_idx: int | None
    ) -> tuple[Prepared, StepResult]:
        self.follow()
        captured = variants.find(family(layout))
        what = (name, dataloader_idx, layout.key)
        lacks = captured is None or (variants.number, what) not in self._prepared
        lacking, apart = agree_on_batch(self._world, what[:2], layout, leaves, lacks, self._steps, variants.state(captured))
        self._steps += 1
        if lacking:
            warn_of_many_layouts(len({known for _, known in self._prepared}))
            compiled = self.machine.compiled(lambda: self._sized(variants, captured, layout), apart)
            if self._begin is not None:
                self._begin(compiled)
                self._begin = None
            self._prepared[variants.number, what] = self.machine.prepare(compiled)
        prepared = self._prepared[variants.number, what]
        variants.ran(prepared.compiled, first_of_epoch=variants.history.batch_idx == 0)
        if apart and prepared.replay.tensors:
            raise PiperError(
                f"the replicas have batches of different shapes in {name}, which logs tensors, and small ones would count as much "
                "as large ones. Use a sampler that divides the data evenly (Lightning's own does), or log in on_..._epoch_end"
            )
        return prepared, self.machine.run(prepared, prepared.compiled.step.inputs(leaves), next(self._seeds))

    def _sized(self, variants: Variants, captured: Compiled | None, layout: BatchLayout) -> Compiled:
        captured = variants.add(family(layout), layout) if captured is None else captured
        return captured.at(layout.size * self._settings.replicas, verify=self._settings.static)

    def _captures(self, name: str, context: Context, dataloader_idx: int | None) -> Variants:
        if (name, dataloader_idx) not in self._variants:

            def captured(layout: BatchLayout, history: History) -> Compiled:
                settings, example = self._settings, layout.times(self._settings.replicas)
                step = capture(self._module, example, self._world.device, context, name, dataloader_idx, history=history)
                return compile_step(step, tuple(settings.program), verify=settings.static, training=self._training)

            self._variants[name, dataloader_idx] = Variants(name, captured)
        return self._variants[name, dataloader_idx]


class Standalone:
    """What `validate`, `test` and `predict` need without a fit, and the sanity check of a fit before its first batch: the first
    step that is run distributes the module.

    Args:
        module: with the values to run with (the lead's count); parts may be on the meta device.
        settings: of the compilation.
        known: values from a checkpoint for what is on the meta device; the rest gets initial ones.
        seed: of the random numbers of steps, where a checkpoint brings one; else it is drawn.
        distributed: called when the module is distributed. Collective.

    Attributes:
        seed: the one that is used.
        drawn: seed of initial values.
        evaluation: runs the steps.
        programs: what evaluations have compiled before this one.
    """

    def __init__(
        self, module: pl.LightningModule, settings: Settings, known: Known, seed: int | None, world: World,
        distributed: Callable[[Ownership], None],
    ) -> None:  # fmt: skip
        self.module, self.settings, self.known, self.world, self._distributed = module, settings, known, world, distributed
        self.drawn = draw_seed(world)
        self.seed = self.drawn if seed is None else seed
        if world.size == 1:
            materialize(module, self.drawn, known)
        self._suspended = suspend(module, world)
        self._ownership: Ownership | None = None
        self._blank = [(name, x, x._version) for name, at in places_of(module).items() if (x := tensor_at(at)).is_meta]
        self.programs: list[Compiled] = []
        self.evaluation = self._new_evaluation()

    def _new_evaluation(self) -> Evaluation:
        machine = Machine(self.settings, self.world)
        return Evaluation(self.module, machine, self.settings, self.world, self.seed, begin=self._begin)

    def _begin(self, first: Compiled) -> None:
        check_devices(first, self.world)
        self._ownership = own = self._distribute(Ownership(self.module, first, self.world, spare_everywhere=True))
        self.evaluation.machine.bind(first, own.owned_params, own.owned_buffers, own.shards, own.layout)
        self.evaluation.follow = Identities(self.module, own).follow

    def _distribute(self, own: Ownership) -> Ownership:
        before = parts_of(self.module)
        if before is not None:
            before.check_unwritten()
        for name, tensor, version in self._blank:
            if tensor._version != version:
                raise PiperError(
                    f"PiperStrategy: {name!r} was changed in place on the meta device, where it has no values yet; give it initial "
                    "values in piper_init_parameters"
                )
        self._blank = []
        own.distribute(self.drawn, self.known if before is None else Known(), before)
        self._distributed(own)
        return own

    def distribute(self, training: Compiled) -> Ownership:
        """A fit takes over, and this is closed: distribute the module by the training step. Collective."""
        return self._distribute(Ownership(self.module, training, self.world))

    def give_back(self) -> None:
        """An evaluation before the first batch of a fit is over: every process that had the whole module has it again, in host
        memory, for hooks may look at it and change it. Collective."""
        if self._ownership is None:
            return
        self._ownership.end()
        self.evaluation.machine.close()
        self._ownership = None
        if not is_on_meta(self.module):
            self.module.cpu()
        self.programs += self.evaluation.programs
        self.evaluation = self._new_evaluation()

    def close(self, failed: bool) -> None:
        """Unless it failed, every process that had the whole module has it again. Collective, unless it failed."""
        resume(self._suspended)
        if self._ownership is not None and not failed:
            self._ownership.end()
            self.evaluation.machine.close()

    def end(self, failed: bool) -> None:
        """Close at the end of a run in which no fit has taken over."""
        self.close(failed)
        if parts_of(self.module) is None and is_on_meta(self.module) and (self.known.loaded or self.known.later):
            self.module.__dict__[UNREAD] = True
            if not failed:
                rank_zero_warn(
                    "the run had no step, before which the module, which is on the meta device, would have got the checkpoint's "
                    "values: it is as it was built"
                )
