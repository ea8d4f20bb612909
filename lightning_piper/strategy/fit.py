"""`Fit`: the state of one call of `Trainer.fit` from its first batch to its last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_piper.capture import PartlyCaptured, flatten
from lightning_piper.common.units import Stopwatch
from lightning_piper.compiler import Compiled
from lightning_piper.directives.replicate import shards_of
from lightning_piper.holdings._torch_foreach import any_nonfinite
from lightning_piper.holdings.added_groups import AddedGroups
from lightning_piper.holdings.gradient_injection import GradientInjection
from lightning_piper.holdings.gradients import HolderExchange, absent
from lightning_piper.holdings.host_states import HostStates
from lightning_piper.holdings.norms import GlobalNorms
from lightning_piper.holdings.optimizer import Names, ShardedOptimizer
from lightning_piper.holdings.tensor_binding import TensorBinding
from lightning_piper.ops.early_update import EarlyUpdate
from lightning_piper.processes.agreement import Agreed, BatchCheck
from lightning_piper.processes.heap import trim
from lightning_piper.processes.settings import Settings, Watched
from lightning_piper.processes.world import on_host
from lightning_piper.profile import Recording, Schedule, recording_of
from lightning_piper.runtime import DigestMismatch, StepResult
from lightning_piper.session.determinism import run_compared
from lightning_piper.session.eager.eager_replicas import why_not
from lightning_piper.session.eager.partial_capture import InPart
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.evaluation import Evaluation
from lightning_piper.session.first_operation import LastStep
from lightning_piper.session.hook_code import hooks_may_use_gradients
from lightning_piper.session.pending_step import PendingStep
from lightning_piper.session.process_runtime import Prepared, ProcessRuntime, check_devices
from lightning_piper.session.programs import TRAINING, KeptCaptures, Programs
from lightning_piper.session.replay import Given
from lightning_piper.session.token_accumulation import TokenAccumulation
from lightning_piper.session.verification import (
    LaterWarnings,
    Verify,
    check_batch_writes,
    summary_of,
    verify_by_execution,
    warn_of_checkpointing,
)
from lightning_piper.strategy.checks import check_optimizer_stays, check_overlap, check_runs_once
from lightning_piper.strategy.compatibility import count_replicas, drops_gradients, resume, suspend
from lightning_piper.strategy.precision import Clipping, LossScaling
from lightning_piper.summary import told_of_capture


class Fit:
    """One fit from its first batch on. All public methods except `arrive` are collective.

    The constructor captures and verifies the step, distributes the module, and connects the processes.

    Args:
        module: The module to be trained.
        before: The owner of the module before this fit.
        batch: The first batch, as the step receives it.
        verify: How the program is verified.
        optimizer: An optimizer over the whole module's parameters.
        names: Names of the optimizer's parameters.
        plugin: The Trainer's precision plugin.
        accumulate: Whether accumulated batches count as `batches` or by their `tokens`; see `PiperStrategy`.
        check: Raises an error if the program must not run. The constructor calls it before it distributes the
            module.
        kept: Captures of earlier fits of this run, to which this fit adds its own; None without spares.

    Attributes:
        before: The owner of the module before this fit.
        identities: The tensors of the plans. Call `follow` before each step.
        world: The processes.
        seed: Seed of the steps' random numbers.
        ownership: The module's tensors on the processes; the module is distributed until `close`.
        programs: The programs of the training step.
        program: The program of the first batch, which determines how the module is distributed.
        optimizer: The sharded optimizer.
        in_part: Runs steps that are captured in part.
        evaluation: Runs all steps except the training step; None if Lightning runs them.
        announce: `ProcessRuntime.announce` of the fit's runtime.
        report: Rank 0's report of the verification by execution; None if no program was run.
        recording: Records the steps; None if they are not recorded.

    Raises:
        PiperError: The processes have different batches, or do not fit the program; or the optimizer cannot
            be divided.
        CaptureError: The step cannot be captured.
        DirectiveError: The step cannot run as the program says.
        VerificationError: The program does not compute what one device computes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        before: Standalone,
        batch: Any,
        verify: Verify,
        optimizer: Optimizer,
        names: Names,
        plugin: Precision,
        accumulate: str = "batches",
        check: Callable[[Compiled], None] = lambda compiled: None,
        kept: KeptCaptures | None = None,
    ) -> None:
        self._module, self.before, self.world, self.seed = module, before, before.world, before.seed
        self._optimizer = optimizer
        self.recording: Recording | None = None
        self.program = self._compile_first_batch(self._compare_first_batch(batch), kept)
        self._check_program(check, batch)
        self._verify_program(verify)
        self._distribute_module()
        self.evaluation = self._prepare_evaluation()
        self._check_earlier_programs()
        self._receive_gradients()
        self.optimizer = self._shard_optimizer(names, plugin, accumulate)
        self._scaling = LossScaling(plugin, optimizer, self.world)  # all processes skip the same steps
        self._accumulate_gradients(accumulate)
        self._replace_clipping(plugin)
        self._take_up(self._last_prepared)
        rank_zero_info(summary_of(self.program, self.report))

    # The steps of the constructor, in their order. All these steps are collective.

    def _compare_first_batch(self, batch: Any) -> Agreed:
        """Compare the first batch and the settings with the other processes."""
        module, settings, world = self._module, self.before.settings, self.world
        self._check = BatchCheck(
            world,
            lambda: not any(map(shards_of, settings.program)) and not why_not(module, settings, world.device),
        )
        self._watched = Watched(self._optimizer)
        self._leaves, self._batch_spec = flatten(batch)
        # Returns the factor that the last `backward` applied to the loss; None before the first `backward`.
        # `_receive_gradients` replaces this function.
        self._factor: Callable[[bool], float | None] = lambda read: None
        self.arrive(batch)
        return self._compare()

    def _compile_first_batch(self, agreed: Agreed, kept: KeptCaptures | None) -> Compiled:
        """End the phase before the fit, and return the program of the first batch."""
        module, settings, world = self._module, self.before.settings, self.world
        self.before.close(failed=False)
        self._runtime = ProcessRuntime(settings, world)
        self.announce = self._runtime.announce
        self.in_part = InPart(module, settings, world, self._runtime.metric_objects)
        self.programs = Programs(module, self._runtime, settings, world, instead=self.in_part.compiled)
        if kept is not None:
            self.programs.reuse(kept, self._batch_spec)
        rank_zero_info("PiperStrategy captures training_step with the first batch")
        with Stopwatch() as watch:
            compiled = self.programs.compile(TRAINING, self._batch_spec, None, agreed.apart)
        self._variants = self.programs.variants(TRAINING)
        if (told := told_of_capture(TRAINING[0], watch.seconds)) is not None:
            rank_zero_info(told)
        return compiled

    def _check_program(self, check: Callable[[Compiled], None], batch: Any) -> None:
        """Check that the program may run on these devices, and that the step does not write into memory that
        two tensors of the batch share. Warn of gradient checkpointing, which would save no memory."""
        check(self.program)
        check_batch_writes(self.program, batch)
        warn_of_checkpointing(self.program, self._module, self.world)
        if not self.before.settings.local:
            check_devices(self.program, self.world, self.before.settings)

    def _verify_program(self, verify: Verify) -> None:
        """Verify the program as `PiperStrategy(verify=...)` says. With "static" and "determinism", also
        prepare the warnings that later captures may give."""
        self.report, found = verify_by_execution(
            verify, self.program, self._module, self._leaves, self.world, rank_zero_info
        )
        warns = verify in ("static", "determinism")
        self._later = LaterWarnings(self.program, self._module, self.world, found) if warns else None
        self._runs_thrice = verify == "determinism"

    def _distribute_module(self) -> None:
        """Give each process its part of the module, and prepare the first program to run on it."""
        module, world, first = self._module, self.world, self.program
        self._suspended = suspend(module, world)
        count_replicas(module.trainer, self.before.settings.everywhere or world)
        self.ownership = self.before.distribute(first)
        if world.device.type == "cpu":
            trim()
        self._runtime.bind(first, self.ownership)
        self.programs.distributed_by(first.dag)
        self._last_prepared = self.programs.prepare(TRAINING, self._batch_spec, first)
        self.identities = TensorBinding(module, self.ownership)

    def _prepare_evaluation(self) -> Evaluation | None:
        """Return the object that runs the steps that do not train; None if Lightning runs them."""
        settings = self.before.settings
        if not settings.evaluates:
            return None
        evaluation = Evaluation(
            self._module, self._runtime, settings, self.world, self.seed, self.program.dag
        )
        evaluation.follow = self.identities.follow
        return evaluation

    def _check_earlier_programs(self) -> None:
        """Check that the evaluation programs from before the fit can also run on the distributed module."""
        for program in [*self.before.programs, *self.before.evaluation.programs]:
            self._runtime.check_held(program, before_fit=True)

    def _receive_gradients(self) -> None:
        """Prepare autograd to receive the gradients of a step."""
        self._injection = GradientInjection(
            self.ownership.owned_params,
            self.world.device,
            absent(self.ownership, self._last_prepared.trained),
        )
        self._factor = self._injection.factor
        self._epoch = -1
        self._in_accumulation = False  # whether earlier batches of an accumulation have gradients
        self._drops = drops_gradients(self._module, self._optimizer)

    def _shard_optimizer(self, names: Names, plugin: Precision, accumulate: str) -> ShardedOptimizer:
        """Return the optimizer over this process's parameters. If the program overlaps its updates with the
        backward pass, check that nothing needs all gradients before the first update."""
        dag = self.program.dag
        sharded = ShardedOptimizer(self._optimizer, names, self.ownership, self.program, self.world)
        if dag.hosted:
            HostStates(sharded, dag.hosted, self.world.device)
        if any(dag.of_type(EarlyUpdate)):
            check_overlap(self._module, sharded, plugin, accumulate, bool(dag.hosted), self.world.device)
            self._runtime.early_updates.take(self._optimizer, self.ownership.owned_params)
        return sharded

    def _accumulate_gradients(self, accumulate: str) -> None:
        """Choose how to weight the gradients of accumulated batches, and whether the processes sum them only
        with the last batch. If a hook in any process may read or change the gradients of each batch, the
        processes sum gradients with each batch, except with "tokens". Collective."""
        local = self.before.settings.local
        self._tokens = (
            TokenAccumulation(self.world, self.ownership, local) if accumulate == "tokens" else None
        )
        seen = self.world.decide(hooks_may_use_gradients(self._module), all=False)
        self._keeps_back = self._tokens is not None or not seen

    def _replace_clipping(self, plugin: Precision) -> None:
        """Make gradient norms and clipping use the gradients of all processes."""
        self._norms = GlobalNorms(
            self.optimizer, self.ownership, self._last_prepared.trained, self.world, self._injection.keeps
        )
        self._clipping = Clipping(plugin, self._norms, self.world)

    def _claim(self, compiled: Compiled, captured_now: bool, together: bool) -> None:
        """Prepare for a new program. If the program trains tensors that no earlier program trained, give
        these tensors to the processes that use them in this program.

        With `verify="static"`, also warn of differences from one device's result.

        Args:
            captured_now: Whether the step was captured for this program.
            together: Whether all processes compile the program. Only then can Piper also try the step.
        """
        if self._later is not None:
            own = self.ownership if together and self.ownership.can_be_whole else None
            self._later.warn(compiled, self._leaves, captured_now, self.programs.traced, own)
        if self.world.size == 1 or not self.ownership.restrict(compiled):
            return
        self.optimizer.drop_unowned()
        self.identities = TensorBinding(self._module, self.ownership)
        if self.evaluation is not None:
            self.evaluation.follow = self.identities.follow
            self.evaluation.check_held()

    def _take_up(self, layout: Prepared) -> None:
        """Make `layout` the current program, so that gradients go to the parameters that this program trains.
        All processes switch together."""
        self._last_prepared = layout
        self.in_parts = self.world.size > 1 and not self.ownership.tensor_map.is_replicated
        self._holder_exchange = HolderExchange(layout.compiled.dag, self.ownership, self.world)
        self._injection.hold(self.ownership.owned_params, absent(self.ownership, layout.trained))
        self._norms.of(layout.trained)

    def record(self, profile: Schedule | bool | None) -> None:
        """Record the steps that the strategy's argument or the Trainer's profiler selects. Collective."""
        self.recording = recording_of(profile, self._module.trainer, self.world, self.report)

    def arrive(self, batch: Any) -> None:
        """Accept the next batch, which is on this process's device."""
        leaves = self._batch_spec.leaves_of(batch)
        self._leaves, self._batch_spec = flatten(batch) if leaves is None else (leaves, self._batch_spec)
        self._fresh, self._compared = True, False

    def _compare(
        self,
        captured: int = 0,
        state: int = 0,
        prepared: Prepared | None = None,
        digests_differed: bool = False,
        retraced: bool = False,
    ) -> Agreed:
        """Compare this batch, the Python state that the step reads, and the settings of the last step with
        the other processes. Return the common decisions of the processes. Collective.

        Args:
            captured: Number of the capture to run, from 0 on; -1 if the capture is yet to be made. The first
                batch passes 0, which will be the number of its capture.
            state: Checksum of the Python state that the step reads.
            prepared: The program to run; None if it is yet to be compiled.
            digests_differed: Whether the digests of the processes differed in this step.
            retraced: Whether the processes have traced the step again.
        """
        self._compared = True
        plans = None if prepared is None else prepared.plans
        return self._check.start(
            self._batch_spec,
            self._leaves,
            self._settings(),
            captured,
            state,
            plans,
            digests_differed,
            retraced,
        )

    def _settings(self) -> Settings:
        read = self._check.reads
        return self._watched(self._factor(read), read) if self.world.size > 1 else ()

    def step(
        self, number: int, batch_idx: int, epoch: int, last: bool = True
    ) -> torch.Tensor | dict[str, Any]:
        """Run the plan on the current batch, log what the step logs, and return its loss.

        A step that is captured in part may return a dict with the loss and other entries.

        Raises:
            CaptureError, DirectiveError, BatchError: This batch cannot run as a captured step. Unless the
                error is `late`, the caller may `give_up` and run the step uncaptured.
            PiperError: The processes differ in their batches or settings. Or a process holds only a part of
                the parameters, and the Trainer's optimizer was replaced or runs the step twice.

        Args:
            number: Number of the batch over the whole training, including earlier epochs and resumed fits.
            batch_idx: Index of the batch in the epoch.
            epoch: The current epoch.
            last: Whether the batch is the last one of a gradient accumulation.
        """
        if self.in_parts:
            check_runs_once(self._fresh)
            check_optimizer_stays(self._optimizer, self._module.trainer.optimizers)
        self._fresh = False
        if self._drops and batch_idx % self._module.trainer.accumulate_grad_batches == 0:
            self._drop_gradients()
        self.optimizer.check_groups_stay()
        self.ownership.check_unwritten()
        self.identities.check_trained()
        pending = self._pending(number, batch_idx, epoch, last)
        carrier = None if pending.keeps else self._digest_carrier()
        result = None if carrier is None else self._run_with_digest(pending, carrier)
        if result is None:
            result = self._run_compared(pending, digests_differed=carrier is not None)
        assert pending.prepared is not None
        self._follow(pending.prepared, result)
        pending.prepared.replay(self._module, result, Given(self._batch_spec, self._leaves))
        loss = self._loss(pending, pending.prepared, result)
        self._in_accumulation = not last
        return {"loss": loss, **self.in_part.extras} if self.in_part.extras else loss

    # The steps of `step`, in their order.

    def _pending(self, number: int, batch_idx: int, epoch: int, last: bool) -> PendingStep:
        """Find the capture and the program for the current batch. In the result, the capture is None if no
        capture is valid for this batch and Python state. The program is None if it is yet to be compiled, or
        if the step has changed since its capture. Then `changed` has the error."""
        captured = self.programs.find(TRAINING, self._batch_spec, batch_idx)
        prepared = self.programs.prepared(TRAINING, self._batch_spec)
        state = self._variants.state(captured)
        first, self._epoch = epoch != self._epoch, epoch
        changed = None if captured is None else self._variants.ran(captured, first)
        if changed is not None:
            prepared = None  # No program is valid now. All processes learn that in the comparison.
        scale = self._scaling.scale / self._module.trainer.accumulate_grad_batches
        keeps = self._keeps_back and not last
        return PendingStep(number, last, first, captured, prepared, state, changed, scale, keeps)

    def _digest_carrier(self) -> Prepared | None:
        """Return the program that ran last, if digests in its all-reduce suffice to compare this step between
        processes. Otherwise return None.

        The decision is the same on all processes.
        """
        if (
            self._compared
            or self.recording is not None
            or self._tokens is not None
            or self._runs_thrice
            or not self._check.may_use_digests
        ):
            return None
        carrier = self._runtime.digest_carrier
        return None if carrier is None or isinstance(carrier.compiled.step, PartlyCaptured) else carrier

    def _run_with_digest(self, pending: PendingStep, carrier: Prepared) -> StepResult | None:
        """Run a step whose all-reduce carries digests.

        Returns None on all processes if the digests differ, or if a process needs a program other than
        `carrier`. Then the step has no result, and the processes must compare before they run the step again.

        Args:
            pending: The step to run.
            carrier: The program that ran last.
        """
        prepared = pending.prepared
        digest = self._check.digest(
            self._batch_spec, self._settings(), pending.state, 0 if prepared is None else prepared.plans
        )
        if prepared is None or prepared.plans != carrier.plans:
            carrier.executors[0].vote_abort()
            return None
        self.ownership.refresh()
        try:
            return self._run(prepared, pending, pending.scale, digest=digest)
        except DigestMismatch:
            return None

    def _run_compared(self, pending: PendingStep, digests_differed: bool) -> StepResult:
        """Compare the step with the other processes, compile its program if necessary, and run it. Sets
        `prepared` and `closing` of `pending`. Collective."""
        variants, captured = self._variants, pending.captured
        agreed = Agreed(False)
        if not self._compared or variants.number != 0:
            # Skipped for the first batch of the fit, which was compared before it was captured.
            retraced = captured is not None and variants.retraced
            agreed = self._compare(
                variants.number, pending.state, pending.prepared, digests_differed, retraced
            )
        if pending.prepared is None or agreed.together:
            pending.prepared = self._prepare(pending, agreed)
        prepared = pending.prepared
        if captured is None:
            variants.ran(prepared.compiled, pending.first)
        if self.recording is not None:
            self.recording.before(prepared)
        if self._may_keep and prepared.plans != self._last_prepared.plans:
            self._sum_kept()
        self.ownership.refresh()
        factor, pending.closing = self._weight_of_batch(prepared.compiled, pending.last)
        result = self._run(prepared, pending, pending.scale * factor, not pending.keeps)
        if self.recording is not None:
            self.recording.after(prepared, pending.number)
        return result

    def _prepare(self, pending: PendingStep, agreed: Agreed) -> Prepared:
        """Return the program of a step on this process's tensors. Compile the program if this process does
        not have it yet, and call `_claim` with it. Collective if `agreed.together`."""
        compiled = self.programs.compile(
            TRAINING,
            self._batch_spec,
            pending.captured,
            agreed.apart,
            collective=agreed.together,
            changed=pending.changed,
        )
        self._claim(compiled, pending.captured is None, agreed.together)
        return self.programs.prepare(TRAINING, self._batch_spec, compiled)

    def _loss(self, pending: PendingStep, prepared: Prepared, result: StepResult) -> torch.Tensor:
        """Return the loss, whose `backward` gives the gradients of the plan to the parameters."""
        assert prepared.replay.dtype is not None
        value = result.metrics[0].to(prepared.replay.dtype, copy=True)
        accumulates = pending.keeps and prepared.accumulates
        nonlinear = prepared.compiled.dag.code.nonlinear
        return self._injection.loss(
            value, result.grads, pending.scale, accumulates, pending.closing, nonlinear
        )

    def _follow(self, prepared: Prepared, result: StepResult) -> None:
        """Make the program that ran the current one. Send gradients and changed buffers to processes that
        hold the parameter or buffer but do not use it in this program. Collective."""
        if prepared.trained != self._last_prepared.trained or prepared.plans != self._last_prepared.plans:
            self._take_up(prepared)
        self._holder_exchange.exchange(result.grads)
        if not self._in_accumulation:
            self._injection.begin()

    def _drop_gradients(self) -> None:
        """Drop old gradients before the step. Lightning would drop the old gradients only after the plan has
        allocated new gradients, so both would take memory at the same time."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def _run(
        self, prepared: Prepared, pending: PendingStep, scale: float, sums: bool = True, digest: int = 1
    ) -> StepResult:
        self._runtime.early_updates.begin(pending.last, self._in_accumulation)
        leaves, running = prepared.compiled.step.inputs(self._leaves), self.in_part.running
        self.ran = LastStep(self._runtime, prepared, leaves, self.seed + pending.number, scale, running)
        if not self._runs_thrice:
            return self.ran.run(sums, digest)
        alone = sums and not self._in_accumulation
        return run_compared(self.ran, sums, alone, self.ownership.owned_buffers, self.world, self._module)

    def nonfinite(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of one element that is not 0 if a gradient may be NaN or infinite, on any process.
        The host does not wait for it. Collective.

        Args:
            gradients: This process's gradients that the optimizer is about to read.
        """
        norm = self._norms.clipped()
        if norm is not None:  # Lightning has just clipped the gradients of all processes
            return ~norm.isfinite()
        flag = any_nonfinite(gradients, self.world.device)
        return flag if self.world.size == 1 or self._norms.is_whole else self._runtime.sum(flag)

    def first_nonfinite(self) -> str | None:
        """Return a text about the first NaN or infinity in the last step. Collective. See
        `LastStep.first_nonfinite`."""
        tensors = {**self.ownership.owned_params, **self.ownership.owned_buffers}
        return self.ran.first_nonfinite(tensors, self.world)

    def _weight_of_batch(self, compiled: Compiled, last: bool) -> tuple[float, float | None]:
        """Return the factor on this batch's gradients and the factor on all gradients of an accumulation. The
        second is None before the last batch of the accumulation, and without token weights. Collective with
        token weights."""
        if self._tokens is None:
            return 1.0, None
        factor, closing = self._tokens.weigh(compiled, compiled.step.inputs(self._leaves), last)
        # Multiply by the number of batches, because Lightning divides the loss by it.
        return (factor * self._module.trainer.accumulate_grad_batches, closing)

    @property
    def _may_keep(self) -> bool:
        """Whether some process may have accumulated gradients of earlier batches locally. The answer is the
        same on all processes."""
        return self._in_accumulation and self._keeps_back

    def _sum_kept(self) -> None:
        """All-reduce locally accumulated gradients now, because another plan continues the accumulation.
        Collective."""
        factor, owned = self._injection.settle(), self.ownership.owned_params
        for name, grad in self._runtime.sum_kept().items():
            if name in owned:
                param, own = owned[name], self.ownership.held_of(name, grad.mul_(factor))
                param.grad = own if param.grad is None else param.grad.add_(own)

    def give_up(self) -> None:
        """End the fit before a step that cannot be captured. Every process gets the whole module, the
        optimizer's whole state, and the gradients of an accumulation that has begun. The module must have
        had values in every process. Collective.
        """
        in_parts = not self.ownership.tensor_map.is_replicated
        if self._may_keep:
            self._sum_kept()
        grads = self.ownership.whole_gradients() if in_parts and self._in_accumulation else {}
        if not in_parts:
            self.close(failed=False, compare=False)
            return
        added = AddedGroups(self.optimizer, self._module)
        state = self.world.broadcast(on_host(self.optimizer.full_state()))
        self.close(failed=False, compare=False)
        self.optimizer.put_back(state)
        added.put_back()
        params = self.ownership.params
        for name, grad in grads.items():
            params[name].grad = grad.to(params[name].device)

    def close(self, failed: bool, compare: bool = True) -> None:
        """End the fit. Unless it failed, every process that had the whole module has it again. Collective,
        unless the fit failed.

        Args:
            failed: Whether the fit failed.
            compare: Whether the last step's settings must still be compared.
        """
        self._clipping.remove()
        self._norms.remove()
        self._scaling.remove()
        self._runtime.metric_objects.release(failed)
        resume(self._suspended)
        if not failed:
            if self.recording is not None:
                self.recording.close()
            if compare:
                self._compare()  # compares the settings of the last step
            self._check.finish()
            self.ownership.check_unwritten()  # after the last step
            if (told := self._variants.told()) is not None:
                rank_zero_info(told)
            self.ownership.end()
        self.programs.clear()
        for name in ("_last_prepared", "ran"):  # they also hold executors, which keep pipes open
            vars(self).pop(name, None)
        if self.evaluation is not None:
            self.evaluation.close(failed)
        self._runtime.early_updates.end()
        self._runtime.close(failed)
