"""The part of `PiperStrategy` that Lightning's evaluation loops call, and the setup of a run of any kind."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_piper.accelerators import capturing
from lightning_piper.capture.cutting.chunk_compiler import checked_options
from lightning_piper.checkpoint.locations import is_remote
from lightning_piper.common.argument_names import problem_of
from lightning_piper.degrees import Degrees
from lightning_piper.directives import Directive, replicas_of
from lightning_piper.directives.program import annotate_as
from lightning_piper.errors import CaptureError, DirectiveError, PiperError
from lightning_piper.holdings.distributed_marks import parts_of, put_together
from lightning_piper.holdings.materialization import is_on_meta, load_state, materialize
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.settings import check_alike
from lightning_piper.session.available_memory import lacks_memory
from lightning_piper.session.eager.conditions import NOT_CAPTURED, check_may_be, may_run_uncaptured
from lightning_piper.session.eager.standalone_module import Standalone
from lightning_piper.session.process_runtime import Settings, check_placed
from lightning_piper.session.program import (
    annotations_for_fit,
    annotations_given,
    for_fit,
    given_or_from_environment,
    is_data_parallel,
    is_searched,
    told,
)
from lightning_piper.session.verification import Verify
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.checkpoints import Restored, of_files
from lightning_piper.strategy.checks import check_averages, check_evaluation, checked_graphs
from lightning_piper.strategy.compatibility import Averages, count_once, resume, suspend
from lightning_piper.strategy.guard import NanGuard
from lightning_piper.strategy.loading.data import draw_seed
from lightning_piper.strategy.phases import Evaluating, Fitting, Idle, Starting
from lightning_piper.strategy.precision import check_precision
from lightning_piper.strategy.process_management import OverProcesses

SEEDS_APART = 2**32  # difference of the seeds of two local replicas; more than a run has steps


class EvaluatingStrategy(OverProcesses):
    """A strategy that runs `validation_step`, `test_step` and `predict_step` as plans over processes.

    If all devices are in one process, Lightning runs the steps itself on the whole module. There is one
    exception: on a simulated accelerator, a program without replicas runs as plans.

    Args:
        directives: The program, in any form that `PiperStrategy` accepts.
        degrees: Parallel degrees instead of directives.
        verify: How compiled programs are verified.
        capture: How to handle a step that cannot be captured: `auto`, `always` or `never`.
        compile: Whether Inductor compiles the code of passes, or its options.
        simulated: Whether all devices are in this process, on a simulated accelerator.
        cuda_graphs: Whether passes run as graphs after the first step.
        options: Arguments of `OverProcesses`.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        if (problem := problem_of(cls, arguments)) is not None:
            raise PiperError(f"{problem} [PIPER-S001]")
        return super().__new__(cls)

    def __init__(
        self,
        directives: Any | None,
        degrees: Degrees | None,
        verify: Verify,
        capture: str,
        compile: Any,
        simulated: bool,
        cuda_graphs: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._simulated, self._cuda_graphs = simulated, checked_graphs(cuda_graphs)
        self._directives, self._verify, self._capture, self._compile = (
            directives,
            verify,
            capture,
            checked_options(compile),
        )
        # (name, value) of arguments that must be equal on all processes
        self._told = [("verify", verify), ("capture", capture), ("compile", bool(compile))]
        self._told += [("cuda_graphs", cuda_graphs)]
        self._degrees = degrees
        self._program: list[Directive] | None = None if degrees else given_or_from_environment(directives)
        self._annotations = {} if degrees else annotations_given(directives)
        self._restored = Restored()
        self._eager_steps: dict[str, str] = {}  # name of each step that runs uncaptured -> why
        # While this stack has a context, every process has the whole module for uncaptured steps.
        self._whole = contextlib.ExitStack()
        self._chosen = contextlib.ExitStack()  # has the callbacks that remove the tags of programs
        self._averages: Averages | None = None
        self._guard: NanGuard | None = None  # checks the gradients of a fit; None without a check

    def configure_launcher(self) -> None:
        """Choose how the other processes start, after a check that the degrees fit the devices.

        Raises:
            DirectiveError: The product of the degrees is not the number of devices.
            PiperError: The processes cannot start.
        """
        if self._degrees is not None and not self._local:
            processes = self.num_processes * self.num_nodes
            local_sgd = self._local_sgd
            self._degrees.for_devices(processes if local_sgd is None else local_sgd.processes(processes))
        super().configure_launcher()

    def setup_environment(self) -> None:
        """Connect the processes. Then check what must be known before callbacks run: whether a callback
        copies a module without values, and whether the device fits a simulated accelerator or graphs."""
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            check_averages(module.trainer, module)
        if self._simulated and self.root_device.type != "cpu":
            raise PiperError(
                f"PiperStrategy(transport='simulated') on {self.root_device}: the simulated accelerator "
                "keeps its tensors on the CPU. Use Trainer(accelerator='cpu') [PIPER-S001]"
            )
        if self._cuda_graphs and not self._simulated:
            capturing(self.root_device)

    def __getstate__(self) -> dict[str, Any]:
        restored = Restored(seed=self._restored.seed)
        return {
            **super().__getstate__(),
            "_restored": restored,
            "_averages": None,
            "_guard": None,
            "_whole": contextlib.ExitStack(),
            "_chosen": contextlib.ExitStack(),
        }

    def _begin_run(self) -> None:
        """Reset the state of earlier runs. Afterwards the module is whole, or a checkpoint has its values.
        Collective."""
        assert self.lightning_module is not None
        self._failed, self.phase, self._eager_steps, self._join = False, Idle(self.phase.left), {}, None
        self._alone = False
        put_together(self.lightning_module, self._restored.known(self.lightning_module))

    def on_train_end(self) -> None:
        if self._guard is not None:
            self._guard.settle()
        self._loaders.remember()

    def _setup_evaluation(self, trainer: pl.Trainer) -> None:
        """Set up `validate`, `test` or `predict` without a fit. Collective.

        Raises:
            PiperError: Piper does not support something that the evaluation uses.
        """
        module = self.lightning_module
        assert module is not None
        known = self._restored.known(module)
        check_evaluation(module, known, self._local)
        if self._evaluates_plainly(module):
            materialize(module, draw_seed(self.world), known)
            super().setup(trainer)
            return
        self.phase = Evaluating(self._set_up(trainer), self.phase.left)
        self.setup_precision_plugin()

    def _evaluates_plainly(self, module: pl.LightningModule) -> bool:
        """Return whether Lightning runs the evaluation steps on the whole module, without plans: all devices
        are in this process and are not simulated, or the program has replicas of simulated devices."""
        if not self._simulated:
            return self._local
        program = for_fit(self._given(), module, 1, lambda text: None, self._is_searched(module))
        return any(replicas_of(program).values())

    def _set_up(self, trainer: pl.Trainer, seed: int | None = None) -> Standalone:
        """Check that all processes have the same program, tag the module's regions, and return the owner of
        the module. The first step that runs distributes the module. Collective.

        Args:
            seed: Seed from a checkpoint; None to draw one.
        """
        module, plugin, restored = self.lightning_module, self.precision_plugin, self._restored
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        check_precision(plugin)
        self.model = plugin.convert_module(module)
        processes = self._program_size
        searched = self._is_searched(module)
        program = for_fit(self._given(), module, processes, rank_zero_info, searched)
        annotations = annotations_for_fit(self._given(), self._annotations, module)
        arguments = [(f"its argument {name!r}", repr(value)) for name, value in self._told]
        check_alike(self.world.gather((("the program", told(program, annotations, searched)), *arguments)))
        check_placed(program, processes, 1 if self._local_sgd is None else self._local_sgd.replicas)
        for handle in annotate_as(module, annotations):
            self._chosen.callback(handle.remove)
        found = {} if self._local else replicas_of(program)
        world = self._world_of(tuple(found.get(rank, 0) for rank in range(processes)))
        # Lightning's precisions use one context for all steps without a backward pass.
        contexts = plugin.train_step_context, plugin.forward_context
        replicas, static = max(found.values(), default=0) + 1, self._verify != "off"
        settings = Settings(
            program,
            replicas,
            static,
            *contexts,
            self._local,
            self._timeout,
            self.syncs_batch_norms,
            in_part=self._capture != "always",
            compile=self._compile,
            device=None if self._local else world.rank,
            simulated=self._simulated,
            cuda_graphs=self._cuda_graphs,
            everywhere=None if self._local_sgd is None else self._all_of(world.replicas),
        )
        if restored.sharded is not None and not is_on_meta(module):
            restored.sharded.whole()
        if trainer.ckpt_path is not None:
            count_once(module, self._all_of(world.replicas))
        drawn, suspended = draw_seed(self.world), suspend(module, world)
        # The local replicas of local SGD draw different random numbers. A checkpoint has the seed of replica 0.
        seed = (drawn if seed is None else seed) + self._local_replica * SEEDS_APART
        self._averages = averages = Averages(trainer, self._in_ranges)

        def distributed(own: Ownership) -> None:
            restored.read(own)
            averages.distribute(own)

        return Standalone(
            module,
            settings,
            restored.known(module),
            seed,
            drawn,
            world,
            distributed,
            partial(resume, suspended),
        )

    @property
    def _degrees_here(self) -> Degrees | None:
        """The degrees passed to the strategy, with the number of replicas that this run's devices allow. None
        if the strategy has no degrees."""
        if self._degrees is None or self._local:
            return self._degrees
        return self._degrees.for_devices(self._program_size)

    def _runs_on(self, processes: int) -> bool:
        assert self.lightning_module is not None
        if self._degrees is None:
            return is_data_parallel(self._directives, self.lightning_module)
        try:
            program = self._degrees.for_devices(processes).program().directives
        except DirectiveError:
            return False
        return sorted(replicas_of(program).values() or [0]) == list(range(processes))

    def _given(self) -> list[Directive] | None:
        """Return the directives passed to the strategy, or the directives of its degrees, without the
        directives that depend on the module. None if the user passed neither."""
        degrees = self._degrees_here
        return self._program if degrees is None else list(degrees.program().directives)

    def _is_searched(self, module: pl.LightningModule) -> bool:
        return self._degrees is None and is_searched(self._directives, module)

    def _in_ranges(self) -> bool:
        """Return whether checkpoints have references to tensors that are saved in ranges."""
        return False

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return the context for `Trainer.init_module` and `configure_model`. With `empty_init=True`, new
        tensors are on the meta device."""
        if not empty_init:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return (
            super().validation_step(*args, **kwargs)
            if self._plain
            else self._evaluate("validation_step", *args)
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*args, **kwargs) if self._plain else self._evaluate("test_step", *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs) if self._plain else self._evaluate("predict_step", *args)

    @property
    def _plain(self) -> bool:
        """Whether Lightning runs the evaluation steps itself, without plans."""
        return self.phase.evaluation is None

    def _evaluate(self, name: str, batch: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> Any:
        """Run a step as a plan, or uncaptured from now on if it cannot be captured. `check_may_be` raises an
        error if not every process can have the whole module until the evaluation ends. Collective."""
        assert isinstance(self.phase, Evaluating | Starting | Fitting) and self.phase.evaluation is not None
        if name not in self._eager_steps:
            try:
                if self._capture == "never":
                    raise CaptureError(
                        f"PiperStrategy(capture='never') does not capture {name}. Leave capture out, so "
                        "that Piper captures it [PIPER-S001]"
                    )
                return self.phase.evaluation.step(name, self._joined(batch), batch_idx, dataloader_idx)
            except NOT_CAPTURED as error:
                check_may_be(self.phase.standalone, name, error, self._capture)
                self._eager_steps[name] = str(error)
                assert self.lightning_module is not None
                trainer = self.lightning_module.trainer
                if not batch_idx and not dataloader_idx:
                    _lightning.log_anew(trainer)
                else:
                    captures = self.phase.evaluation.captures(name)
                    _lightning.log_apart(trainer, name, captures, self._drawing.count)
        self._bring_together(name)
        self._alone = True
        arguments = [batch, batch_idx] if dataloader_idx is None else [batch, batch_idx, dataloader_idx]
        run: Callable[..., Any] = getattr(super(), name)
        return run(*arguments)

    def _bring_together(self, step: str) -> None:
        """Give every process the whole module until the evaluation ends. A module that is not distributed is
        only moved to the process's device. If it is on the meta device, it gets its values: without a fit, it
        keeps them. Collective.

        Raises:
            PiperError: A process does not have memory for the whole module.
        """
        assert self.lightning_module is not None
        parts = parts_of(self.lightning_module)
        if parts is None:
            if is_on_meta(self.lightning_module):
                assert isinstance(self.phase, Evaluating | Starting)
                with torch.inference_mode(False):
                    if isinstance(self.phase, Starting):
                        self._whole.enter_context(self.phase.standalone.with_values())
                    else:
                        self.phase.standalone.materialize()
            self.lightning_module.to(self.root_device)
        elif not parts.whole:
            assert isinstance(self.phase, Evaluating | Starting | Fitting)
            if (lacking := lacks_memory(self.lightning_module, self.phase.standalone.world)) is not None:
                raise PiperError(
                    f"PiperStrategy: {step} runs uncaptured, but {lacking}. Piper could not capture {step}, because: "
                    f"{self._eager_steps[step]}. Change {step} so that Piper can capture it [PIPER-S013]"
                )
            with torch.inference_mode(False):
                self._whole.enter_context(parts.whole_everywhere())

    def on_validation_start(self) -> None:
        self._begin_evaluation("validation_step")

    def on_test_start(self) -> None:
        self._begin_evaluation("test_step")

    def _begin_evaluation(self, name: str) -> None:
        """Decide, at the start of an evaluation over replicas, whether its steps can run captured.
        Collective.

        A captured step runs on all processes at once, so a process with fewer batches would miss the last
        steps. If the numbers of batches may differ, the steps run uncaptured, or `check_may_be` raises an
        error. Only a prediction may have numbers that differ, if all of them are known
        (`session.evaluation.Evaluation.expect`).
        """
        evaluation, module = self.phase.evaluation, self.lightning_module
        if evaluation is None:
            return
        assert module is not None and isinstance(self.phase, Evaluating | Starting | Fitting)
        world = self.phase.standalone.world
        if world.count == 1:
            return
        if name not in self._eager_steps:
            before = self.phase.standalone
            lengths = world.gather(_lightning.evaluation_lengths(module.trainer))
            unknown = any(None in each for each in lengths)
            assumed = unknown and self._capture != "always" and may_run_uncaptured(before)
            expected = name == "predict_step" and not unknown
            if (len(set(lengths)) == 1 or expected) and not assumed:
                return
            problem = (
                "numbers of batches that may differ between processes. Use a sampler that gives every process "
                "the same number (Lightning's own does)"
            )
            check_may_be(before, name, problem, self._capture)
            self._eager_steps[name] = problem
            _lightning.log_anew(module.trainer)
        self._bring_together(name)  # `_evaluate` would be too late: a process may have no batch.
        self._alone = True

    def _end_evaluation(self) -> None:
        self._alone = False
        self._whole.close()

    def on_test_end(self) -> None:
        self._end_evaluation()

    def on_predict_end(self) -> None:
        self._end_evaluation()

    def on_validation_end(self) -> None:
        """End a validation. After a sanity check, undo the distribution of the module, because hooks before
        the first batch must see the module as it was before."""
        self._end_evaluation()
        if isinstance(self.phase, Starting) and self.phase.evaluation is not None:
            self.phase.standalone.give_back()

    def on_predict_start(self) -> None:
        if self.phase.evaluation is not None:
            assert self.lightning_module is not None
            self.phase.evaluation.set_batch_counts(self.lightning_module.trainer.predict_loop.max_batches)
        self._begin_evaluation("predict_step")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. On rank 0 it is whole, even while parts of the module are on other
        processes. Collective.

        Raises:
            PiperError: The module is on the meta device and has not run a step.
        """
        assert self.lightning_module is not None
        parts = parts_of(self.lightning_module)
        if parts is None and is_on_meta(self.lightning_module):
            raise PiperError(
                "PiperStrategy: the module is on the meta device and has no values to save before the first "
                "step of a run. Save after the first step [PIPER-S009]"
            )
        with contextlib.nullcontext() if parts is None else parts.whole_on_rank_zero(), self._whole_metrics():
            return super().lightning_module_state_dict()

    def _whole_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which metric objects of captured steps have the states of all samples.
        Collective."""
        evaluation = self.phase.evaluation
        return contextlib.nullcontext() if evaluation is None else evaluation.runtime.metric_objects.whole()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a plain checkpoint. If several processes load a local file for a module on the meta device,
        the tensors stay in the file until Piper uses them."""
        ours = (
            of_files(self.checkpoint_io, checkpoint_path) is not None
            and not is_remote(checkpoint_path)
            and zipfile.is_zipfile(checkpoint_path)
        )
        if (
            not ours
            or self.world.size == 1
            or self.lightning_module is None
            or not is_on_meta(self.lightning_module)
        ):
            return super().load_checkpoint(checkpoint_path, weights_only)
        content: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only
        )
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the values of tensors with data. `_restored` keeps the values of tensors on the meta device
        until the module is distributed."""
        module = self.lightning_module
        assert module is not None
        if not is_on_meta(module):
            super().load_model_state_dict(checkpoint, strict)
            return
        parts = parts_of(module)
        self._restored.values = load_state(
            module, checkpoint["state_dict"], strict, keep=parts is not None and parts.ended
        )
