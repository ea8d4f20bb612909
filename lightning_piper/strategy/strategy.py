"""`PiperStrategy`: Lightning's Trainer runs a checked plan instead of the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_piper.capture.graph_cache.tracing_run import long_steps_refused
from lightning_piper.compiler import Compiled
from lightning_piper.degrees import requested_degrees
from lightning_piper.errors import BatchError, DirectiveError, PiperError
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.holdings.optimizer import parameter_names_in
from lightning_piper.profile import Schedule, schedule_of
from lightning_piper.search.costs.optimizers import states_of
from lightning_piper.session.auto_search import choose
from lightning_piper.session.available_memory import NoRoom, check_room
from lightning_piper.session.determinism import compare_uncaptured
from lightning_piper.session.eager.conditions import NOT_CAPTURED, check_may_be, is_as_under_ddp, summary_of
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.local_sgd import LocalSGD, Rounds
from lightning_piper.session.step_times import StepTimes
from lightning_piper.session.verification import Verify
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.checkpoints import Restored
from lightning_piper.strategy.checks import (
    check_choices,
    check_fit,
    check_local_fit,
    check_local_sgd,
    check_optimizers,
    check_start_method,
    checked_capture,
    checked_timeout,
    needs_replicas,
    uncapturable,
)
from lightning_piper.strategy.fit import Fit
from lightning_piper.strategy.guard import NanGuard
from lightning_piper.strategy.loading.other_optimizer import NamingOptimizers
from lightning_piper.strategy.loading.skipped_epochs import check_skips, returns_only_none
from lightning_piper.strategy.phases import Eager, Ended, Fitting, Idle, Left, Starting, over
from lightning_piper.strategy.process_management import Requeue
from lightning_piper.strategy.saving import SavingStrategy
from lightning_piper.strategy.spares._lightning import WarmedUp
from lightning_piper.strategy.spares.checks import checked_spares


class PiperStrategy(SavingStrategy):
    """A strategy that trains a LightningModule under a program of directives, checked against one device.

        strategy = PiperStrategy(directives=schedules.one_f_one_b(2, 8))
        Trainer(accelerator="cpu", devices=2, strategy=strategy).fit(module, loader)

    It works with Trainers and modules of `lightning` and of `pytorch_lightning`.

    Args:
        directives: A list of directives or JSON objects, the path of a JSON file, or the result of a schedule
            builder. "ddp", "zero1", "zero2" and "zero3" mean replicas on all processes, with this ZeRO stage.
            By default, Piper uses the file that the environment variable PIPER_DIRECTIVES names. If the
            variable is not set, it uses the module's `piper_directives`. If the module does not have this
            attribute, it uses data parallelism over all processes. "auto" is like the default, but a search
            may replace data parallelism at the first batch. Each process then still draws its own data.
        pp, dp, tp, cp, ep, zero, schedule, microbatches, recompute, chunk_loss: The program as parallel degrees
            instead of `directives`. `lightning_piper.parallel` explains them. By default, `dp` follows from
            the number of processes. Directives that depend on the module are written at the first batch.
        verify: `static` checks every rewrite and plan without running it. `first_batch` also runs the
            finished program on one batch and compares the result with one device's. `each` also runs and
            compares the program after every directive, and prints the report. `determinism` is `static`, and
            runs each training batch three times: different bits are an error. `off` checks nothing.
        transport: `process` has a process for each logical device. `local` runs all of them in this process,
            with `devices=1`. `simulated` is like `local`, on a simulated accelerator that orders its streams
            differently in each step. The result then has the same bits as with `local`, or there is an error.
        profile: Which steps to record. True is `Schedule()`, which records steps 6 to 8, counted from 0 (see
            `lightning_piper.profile`). By default, there is a recording only if the Trainer's profiler is a `PiperProfiler`.
        timeout: How long a process waits for other processes before communication fails: a `timedelta` or a
            number of seconds.
        start_method: Only `popen`, which starts one new Python process for each device.
        process_group_backend: Backend of the default process group (default: `gloo` on CPU; CUDA needs `nccl`).
        checkpoint: The form of a fit's checkpoints. `consolidated` is a plain Lightning checkpoint, which one
            process gathers and writes. `sharded` is a directory, in which every process writes its own part.
            A fit can load both forms. If its step runs uncaptured, it saves and loads only `consolidated`.
        accumulate: The meaning of `Trainer(accumulate_grad_batches=k)`. `batches` is the mean of the batches'
            losses, as in Lightning. `tokens` is the loss of all batches as one batch: each batch's loss is
            weighted by its denominator (its number of tokens or samples).
        capture: How to handle a step that cannot be captured as a whole. With `auto`, Piper warns. It runs
            the step uncaptured if the program only replicates it, or else captures the calls of annotated
            modules. If this fails, or with `always`, there is an error. `never` runs all steps uncaptured.
        compile: True, or options of Inductor, which then compiles each pass at the first batch. Results are
            equal within rounding.
        cuda_graphs: Whether to capture passes into CUDA graphs after the first step, and to replay the graphs in later
            steps. The results are the same. Needs CUDA devices, or `transport="simulated"`.
        whole: With "auto", each process keeps the whole module as long as replicas fit into memory. Hooks and
            callbacks can read, change and run it as under DDP. False allows the search any program, which may
            be faster.
        stop_on_nan: Whether to stop the training if a gradient is NaN or infinite on any process: on a CPU before
            the update, on an accelerator before the next update.
        spares: Number of spare processes. They start with the other processes, run the script up to `fit` and wait. If
            a process is lost in `fit`, a spare replaces it, and the last step runs again from copies in memory. If no
            spare is left, replicas continue with fewer processes.
        local_sgd: Settings of local SGD (DiLoCo), under which several replicas of the program train alone and
            exchange their parameters now and then (default: no local SGD). See `LocalSGD`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for
            Lightning's own strategies.

    Raises:
        DirectiveError: A directive is malformed.
        PiperError: Another argument has an invalid value.
    """

    strategy_name = "piper"

    def __init__(
        self,
        directives: Any | None = None,
        *,
        pp: int | None = None,
        dp: int | tuple[int, int] | None = None,
        tp: int | None = None,
        cp: int | None = None,
        ep: int | None = None,
        zero: int | None = None,
        schedule: str | None = None,
        microbatches: int | None = None,
        recompute: bool | None = None,
        chunk_loss: bool | None = None,
        verify: Verify = "static",
        transport: Literal["process", "local", "simulated"] = "process",
        profile: Schedule | bool | None = None,
        timeout: timedelta | float = default_pg_timeout,
        start_method: Literal["popen"] = "popen",
        process_group_backend: str | None = None,
        checkpoint: Literal["consolidated", "sharded"] = "consolidated",
        accumulate: Literal["batches", "tokens"] = "batches",
        capture: Literal["auto", "always", "never"] = "auto",
        compile: bool | dict[str, Any] = False,
        cuda_graphs: bool = False,
        whole: bool = True,
        stop_on_nan: bool = True,
        spares: int = 0,
        local_sgd: LocalSGD | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_choices(
            verify=verify, transport=transport, checkpoint=checkpoint, accumulate=accumulate, capture=capture
        )
        check_start_method(start_method)
        check_local_sgd(local_sgd, directives, transport, checkpoint, capture)
        recorded = schedule_of(profile)
        degrees = requested_degrees(
            directives,
            pp=pp,
            dp=dp,
            tp=tp,
            cp=cp,
            ep=ep,
            zero=zero,
            schedule=schedule,
            microbatches=microbatches,
            recompute=recompute,
            chunk_loss=chunk_loss,
        )
        super().__init__(
            None if degrees else directives,
            degrees,
            verify,
            checked_capture(transport, capture, compile),
            compile,
            sharded=checkpoint == "sharded",
            simulated=transport == "simulated",
            cuda_graphs=cuda_graphs,
            local=transport != "process",
            local_sgd=local_sgd,
            spares=checked_spares(spares, transport, local_sgd),
            timeout=checked_timeout(timeout),
            backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._told += [("profile", recorded), ("checkpoint", checkpoint), ("accumulate", accumulate)]
        self._told += [("whole", whole), ("stop_on_nan", stop_on_nan), ("local_sgd", local_sgd)]
        self._told += [("spares", spares)]
        self._profile, self._transport = profile, transport
        self._keeps_whole, self._accumulate, self._stops_on_nan = whole, accumulate, stop_on_nan
        self._accumulating = False  # whether the batch is not the last one of a gradient accumulation
        self._times: StepTimes | None = None  # measures a searched program's first steps; None without one

    def __repr__(self) -> str:
        given = "no directives of its own" if self._program is None else f"{len(self._program)} directives"
        given = given if self._degrees is None else repr(self._degrees)
        return f"<PiperStrategy: {given}, transport={self._transport!r}>"

    def setup(self, trainer: pl.Trainer) -> None:
        """Begin a run: set up an evaluation, or prepare a fit. For a fit, check that Piper supports it, make
        the optimizers, and decide whether the step runs uncaptured and whether to search for a program. The
        first batch then begins the training. Collective."""
        self._begin_run()
        _lightning.forget_logs(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            self._setup_evaluation(trainer)
            return
        module, restored = self.lightning_module, self._restored
        assert module is not None
        self.phase, self._times = Idle(Left(self.phase.left.seed)), None
        check_fit(trainer, module, self.world.size, self.layer_sync, restored.known(module))
        if self._local_sgd is not None:
            check_local_fit(trainer, self.precision_plugin, self._is_searched(module))
        self.phase = phase = Starting(self._set_up(trainer, restored.seed))
        if self._local:
            self.model_to_device()
        self.setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        self._guard = NanGuard(module, self.precision_plugin, lambda: self.phase, self._stops_on_nan)
        self._at_end.callback(self._guard.remove)
        problem = uncapturable(module, self.optimizers, self._program_size, self._capture)
        if problem is not None:
            self._check_captured(problem)
            check_may_be(phase.standalone, "training_step", problem, self._capture, self._accumulate)
            phase.eager = problem
            self.model_to_device()  # the steps of a sanity check also run uncaptured
        else:
            phase.names = parameter_names_in(self.optimizers[0], module)
        if self.world.size > 1 and self._is_searched(module):
            problem = next(filter(None, self.world.gather(problem or needs_replicas(trainer, module))), None)
            phase.searches = problem is None
            if problem is not None:
                rank_zero_info(
                    f"PiperStrategy does not search for a program and uses data parallelism: {problem}"
                )

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._requeue = Requeue.of(self.lightning_module.trainer, self.world, self._meets)
        self._loaders.begin(self.lightning_module.trainer)
        if self._restored.monitored is not None:
            _lightning.continue_monitoring(self.lightning_module.trainer, self._restored.monitored)
        if self._copies is not None:
            self._keep_copies(self.lightning_module.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Accept the next batch. The first batch of a fit also begins the training, because a capture needs
        the shapes of a batch. Collective.

        Raises:
            PiperError: The module's hook of the same name has returned -1 on some processes only. Or an error of the
                capture.
        """
        module = self.lightning_module
        if module is not None and not returns_only_none(module.on_train_batch_start) and self.world.size > 1:
            check_skips(module, self.world, batch_idx)
        if isinstance(self.phase, Fitting):
            self._arrive(self.phase, batch)
        elif isinstance(self.phase, Starting):
            self._first_batch(self.phase, batch)
        if isinstance(self.phase, Eager):
            self.phase.arrive()
        if self._termination is not None:
            self._termination.trains()

    def _arrive(self, phase: Fitting, batch: Any) -> None:
        try:
            phase.fit.arrive(self._joined(batch))
        except BatchError as error:  # the batches of the processes can no longer be joined
            self._give_up(phase, error)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if isinstance(self.phase, Eager):
            self.phase.share_buffers()

    def _first_batch(self, start: Starting, batch: Any) -> None:
        """Begin the training with a captured step, or uncaptured if the step cannot be captured.
        `check_may_be` raises an error if neither is possible. Collective."""
        why = start.eager
        if why is None:
            try:
                self._begin_captured(start, batch)
                return
            except NOT_CAPTURED as error:
                why = str(error)
                self._check_captured(error)
                check_may_be(start.unsearched, "training_step", error, self._capture, self._accumulate)
                self._join = start.give_back(self._chosen, rank_zero_info)
        self._begin_eager(start.standalone, [], why)
        if start.later is not None:
            self.load_optimizer_state_dict({"optimizer_states": [start.later]})
        _lightning.move_optimizers(self.optimizers, self.root_device)

    def _begin_captured(self, start: Starting, batch: Any) -> None:
        """Begin a fit with a captured step. If Piper may search for a program, it searches immediately with
        `whole=False`. With `whole=True`, it searches only if replicas do not fit into memory. Collective."""
        if start.searches and self._keeps_whole:
            try:
                self._begin_fit(start, batch, partial(self._check_room, start))
                return
            except NoRoom as error:
                rank_zero_info(f"PiperStrategy searches for a program, because {error}")
        if start.searches:
            self._choose(start, batch)
        degrees = self._degrees_here
        if degrees is not None and degrees.needs_module:
            start.write(partial(degrees.program, start.standalone.module, batch), self._chosen)
        try:
            self._begin_fit(start, self._joined(batch))
        except PiperError:
            start.forget()
            raise

    def _check_room(self, start: Starting, compiled: Compiled) -> None:
        module = start.standalone.module
        check_room(compiled, module, self.world, states_of(self.optimizers[0], module))
        rank_zero_info(
            "PiperStrategy: replicas fit into memory, so each process keeps the whole module, as under DDP. "
            "PiperStrategy('auto', whole=False) searches among all programs"
        )

    def _choose(self, start: Starting, batch: Any) -> None:
        """Search for a program. `start` keeps its program if the search chooses none. Collective."""
        module, optimizer = self.lightning_module, self.optimizers[0]
        assert module is not None
        world, apart = self.world, self._world_of(())
        choice = choose(module, batch, world, apart, rank_zero_info, optimizer, self._keeps_whole)
        if choice is not None:
            self._join = start.take_over(choice, self._world_of, self._chosen)
            # The prediction is for an optimizer step with one batch.
            if module.trainer.accumulate_grad_batches == 1:
                self._times = StepTimes(choice.predicted, rank_zero_info)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Measure a searched program's first optimizer steps, to report a wrong prediction. Under local SGD,
        exchange parameters after the step if they are due."""
        with self._times or contextlib.nullcontext(), NamingOptimizers([optimizer]):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(self.phase, Fitting) and self.phase.rounds is not None:
            assert self.lightning_module is not None
            recording, trainer = self.phase.fit.recording, self.lightning_module.trainer
            loop = trainer.fit_loop.epoch_loop
            count = partial(self.phase.rounds.after_update, trainer.current_epoch, loop.batch_idx)
            if recording is not None and self.phase.rounds.is_due:
                recording.exchange(count)
            else:
                count()
        return result

    def _begin_eager(self, before: Standalone, captures: Sequence[Compiled], why: str) -> None:
        """Run the training step uncaptured from now on, and log `why`. `captures` are the captures of this
        step that have run in the fit; empty if there were none. Collective."""
        self._end_warm_up()
        self._times = None
        rank_zero_info(summary_of(before.world.size, why))
        self.phase = Eager.begin(before, self.optimizers)
        assert self.lightning_module is not None
        self.phase.record(self._profile, self.lightning_module.trainer)
        _lightning.log_apart(self.lightning_module.trainer, "training_step", captures, self.world.size)

    def _begin_fit(
        self, start: Starting, batch: Any, check: Callable[[Compiled], None] = lambda compiled: None
    ) -> None:
        """Begin a fit whose step is captured with this batch, unless `check` raises an error. Collective."""
        module, optimizer = self.lightning_module, self.optimizers[0]
        assert module is not None
        # Hooks may have changed the optimizer's groups.
        names = parameter_names_in(optimizer, module, start.names)
        state = start.resumed(optimizer)
        plugin, verify, before = self.precision_plugin, self._verify, start.standalone
        with long_steps_refused(partial(is_as_under_ddp, start.unsearched, self._capture, self._accumulate)):
            check = self._end_warm_up if self._warms_up else check
            accumulate, kept = self._accumulate, self._captures
            fit = Fit(module, before, batch, verify, optimizer, names, plugin, accumulate, check, kept)
        fit.in_part.before = self._settle
        rounds = self._rounds(fit)
        self.phase = Fitting(fit, start, rounds=rounds)
        if state is not None and not (start.resumes and fit.optimizer.is_whole):
            with NamingOptimizers(self.optimizers):
                self._load_optimizer(fit, {**state, "param_groups": fit.optimizer.full_groups()})
        _lightning.move_optimizers(self.optimizers, self.root_device)
        fit.record(self._profile)
        if self._local_replica:
            fit.recording = None  # local replica 0 writes the files
        if rounds is not None and fit.recording is not None:
            fit.recording.exchanged = rounds.nbytes

    def _end_warm_up(self, *given: object) -> None:
        """End the fit here if it is a warm-up."""
        if self._warms_up:
            raise WarmedUp

    def _rounds(self, fit: Fit) -> Rounds | None:
        """Return the exchanges of a fit under local SGD, after all replicas have the same parameters, or the
        parameters of the checkpoint; None without local SGD. Collective."""
        if self._local_sgd is None:
            return None
        state, self._restored.local_sgd = self._restored.local_sgd, None
        replica = self._local_replica
        rounds = Rounds(self._local_sgd, fit.ownership, fit.optimizer, fit.world, replica, state)
        rank_zero_info(rounds.summary())
        return rounds

    def _check_captured(self, why: str | Exception) -> None:
        """Check that the training step may run uncaptured, after `why` prevents a capture.

        Raises:
            PiperError: Local SGD needs a captured step. If `why` is an error of the program or of the batch, this
                is the error.
        """
        if self._local_sgd is not None:
            if isinstance(why, DirectiveError | BatchError):
                raise why
            raise PiperError(
                f"PiperStrategy(local_sgd=...) trains only captured steps, but this step cannot be captured: {why}"
                " [PIPER-S002]"
            )

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.forget_optimizers()
        super().setup_optimizers(trainer)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a plan if the step is captured; otherwise run the module's step. During an uncaptured manual
        step, every backward pass averages gradients, because the step may call `loss.backward()` directly."""
        assert self.lightning_module is not None
        if isinstance(self.phase, Fitting):
            return self._run_plan(self.phase, batch, *args, **kwargs)
        if not isinstance(self.phase, Eager):
            return super().training_step(batch, *args, **kwargs)
        step = partial(super().training_step, batch, *args, **kwargs)
        if self._guard is not None:
            self._guard.note(step, batch)
        with self.phase.batch_norms():
            if self._verify == "determinism":
                compare_uncaptured(step, self.lightning_module, self.world)
            if self.lightning_module.automatic_optimization:
                return step()
            self.phase.average()
            try:
                return step()
            finally:
                self.phase.stop_averaging()

    def _run_plan(self, phase: Fitting, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the captured step on the current batch. If the step cannot be captured for this batch, run it
        uncaptured from now on."""
        assert self.lightning_module is not None
        fit, loop = phase.fit, self.lightning_module.trainer.fit_loop.epoch_loop
        try:
            fit.identities.follow()  # may change parameters
            with self._unwatched():
                return fit.step(
                    loop.total_batch_idx,
                    loop.batch_idx,
                    self.lightning_module.current_epoch,
                    last=not self._accumulating,
                )
        except NOT_CAPTURED as error:
            self._give_up(phase, error)
            return self.training_step(batch, *args, **kwargs)

    def _give_up(self, phase: Fitting, error: Exception) -> None:
        """Run the step uncaptured on all processes from now on, because the captured step cannot continue.
        Collective."""
        fit, start = phase.fit, phase.start
        self._settle()
        self._check_captured(error)
        check_may_be(start.unsearched, "training_step", error, self._capture, self._accumulate)
        fit.give_up()
        self._join = start.give_back(self._chosen, rank_zero_info)
        self._begin_eager(start.standalone, [fit.program], str(error))

    # The Trainer calls `pre_backward` and `post_backward` around a backward pass of automatic optimization or
    # of `manual_backward`. If the pass raises an error, the run ends, so `post_backward` need not run.

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if isinstance(self.phase, Eager):
            self.phase.before_pass(last=not self._accumulating)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if isinstance(self.phase, Eager):
            self.phase.after_pass()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The context in which the Trainer runs all batches of a gradient accumulation except the last."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def teardown(self) -> None:
        """End the run: finish saves, close the phase, and stop the watches."""
        self._saves.end(self._failed)
        if self._copies is not None:
            self._copies.wait()
        self._whole.close()  # still open after a failure
        self._chosen.close()
        phase, self.phase = self.phase, over(self.phase)
        if not isinstance(phase, Idle | Ended):
            phase.close(self._failed)
        if isinstance(phase, Starting) and not self._failed:
            self._end_without_updates(phase)
        self._end_run()
        self._restored, self._held = Restored(), None
        if self._averages is not None:
            self._averages.release()
        assert self.accelerator is not None and self.cluster_environment is not None
        module = self.lightning_module
        if module is not None and is_on_meta(module):
            # Like `super().teardown()`, but without moving the module and the optimizers to the CPU. After a
            # failure, the module may have tensors on the meta device, which cannot be moved.
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
        else:
            super().teardown()
