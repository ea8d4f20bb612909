"""`PiperStrategy`: Lightning's Trainer runs a checked plan instead of the training step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from lightning_piper.directives import replicas_of
from lightning_piper.errors import PiperError
from lightning_piper.limits import shown
from lightning_piper.profile import Schedule, schedule_of
from lightning_piper.strategy.checkpoint import KEY, check_target, found_at, read_plain, remove_in_one_go, save_in_one_go, seed_of
from lightning_piper.strategy.checks import check_fit, check_optimizers, one_of
from lightning_piper.strategy.copying import without_fit
from lightning_piper.strategy.evaluating import EvaluatingStrategy
from lightning_piper.strategy.failure import FailureWatch
from lightning_piper.strategy.fit import Fit
from lightning_piper.strategy.launching import check_one_process, check_script
from lightning_piper.strategy.machine import Settings
from lightning_piper.strategy.materialize import is_on_meta
from lightning_piper.strategy.optimizer import Names, ShardedOptimizer, State, check_groups, names_in
from lightning_piper.strategy.ownership import put_together
from lightning_piper.strategy.program import for_fit, given_or_from_environment
from lightning_piper.strategy.sharded_checkpoint import save
from lightning_piper.strategy.sharded_state import Loading, module_state, optimizer_state, pieces_of, referenced
from lightning_piper.strategy.verification import ACCEPTED, Verify
from lightning_piper.strategy.world import World, store_of_attempt


class PiperStrategy(EvaluatingStrategy):
    """Trains a LightningModule under a program of directives, checked against what one device computes.

        Trainer(accelerator="cpu", devices=2, strategy=PiperStrategy(directives=schedules.one_f_one_b(2, 8))).fit(module, loader)

    Works with `lightning`, not with `pytorch_lightning`, whose classes are others of the same names.

    Args:
        directives: a list of directives or JSON objects, the path of a JSON file, or what a schedule builder returns. Left out:
            the file that the environment variable PIPER_DIRECTIVES names, else the module's `piper_directives`.
        verify: `static` checks every rewrite and plan without running it; `first_batch` also runs the finished program on one
            batch and compares with one device; `each` does so after every directive and prints the report; `off` checks nothing.
        transport: `process` has a process for each logical device; `local` runs all of them in this one, with `devices=1`.
        profile: which steps to record (see `lightning_piper.profile`); True records a few of the first ones.
        timeout: after which communication that nobody answers fails.
        start_method: only `popen`, one new Python process for each device.
        process_group_backend: of the default process group; `gloo` on CPU and `nccl` on CUDA if left out.
        checkpoint: what a fit saves. `consolidated`: a plain Lightning checkpoint, gathered in one process and written by it.
            `sharded`: a directory, in which every process writes what it holds. Both load, whatever this says.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for Lightning's own strategies.

    Raises:
        DirectiveError: a directive is malformed.
        PiperError: another argument has a value that it cannot have.
    """

    strategy_name = "piper"

    def __init__(
        self,
        directives: Any | None = None,
        *,
        verify: Verify = "static",
        transport: Literal["process", "local"] = "process",
        profile: Schedule | bool | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: Literal["popen"] = "popen",
        process_group_backend: str | None = None,
        checkpoint: Literal["consolidated", "sharded"] = "consolidated",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        one_of("verify", verify, ACCEPTED)
        one_of("transport", transport, ("process", "local"))
        one_of("checkpoint", checkpoint, ("consolidated", "sharded"))
        if not isinstance(start_method, str) or start_method != "popen":
            raise PiperError(
                f"PiperStrategy(start_method={shown(start_method)}): a spawned or forked worker cannot hand a module back whose "
                "parts are on several processes; use 'popen' (the script runs once for each device), torchrun, or transport='local'"
            )
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise PiperError(f"PiperStrategy(timeout={shown(timeout)}): give a positive datetime.timedelta")
        self._program = given_or_from_environment(directives)
        self._verify, self._timeout = verify, timeout
        schedule_of(profile)
        self._profile = profile
        self._local = transport == "local"
        self._backend = process_group_backend
        self._sharded = checkpoint == "sharded"
        self._loading: Loading | None = None
        self._fit: Fit | None = None  # from the first batch on
        self._names: Names = []  # of the optimizer's parameters
        self._later: State | None = None  # of the optimizer, from a checkpoint, for what it has from the first batch on
        self._resumes = False  # before the first batch: the optimizer has its state from a checkpoint
        self._trained: ShardedOptimizer | None = None  # the Trainer's, after the first batch, until the next fit
        self._replicas: tuple[int, ...] = ()  # of each process in this fit, where processes draw the data of several
        self._resumed_seed: int | None = None
        self._seed: int | None = None  # of the steps of this fit, or of the last one
        self._failed = self._accumulating = False
        self._watch: FailureWatch | None = None
        self.num_nodes = 1

    def __repr__(self) -> str:
        given = "no directives of its own" if self._program is None else f"{len(self._program)} directives"
        transport = "local" if self._local else "process"
        return f"<PiperStrategy for lightning.pytorch.Trainer (not for pytorch_lightning's): {given}, transport={transport!r}>"

    def __getstate__(self) -> dict[str, Any]:
        return without_fit(super().__getstate__(), 1 if self._local else self.world_size)

    # Processes

    @property
    def is_distributed(self) -> bool:
        """Do processes read different data? Lightning gives them a sampler then, which shuffles also where the user does not.

        Without replicas all processes are stages of one pipeline: they read the same data in the order that the user chose.
        """
        return max(self._replicas, default=0) > 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world.count, "rank": self.world.replica}

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def world(self) -> World:
        return World(self.global_rank, 1 if self._local else self.world_size, self.root_device, self._timeout, self._replicas)

    def set_world_ranks(self) -> None:
        """Called by the Trainer as soon as it knows the devices."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for only in (rank_zero_only, fabric_rank_zero_only):
            only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        if self._local:
            check_one_process(self.num_processes, self.num_nodes)
            return
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            if self.num_processes > 1 or hasattr(sys, "ps1"):
                check_script()
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        if self._local:
            if (started := self.cluster_environment.world_size()) != 1:
                raise PiperError(f"PiperStrategy(transport='local') runs in one process, but {started} were started")
            return
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.set_world_ranks()
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        store = store_of_attempt(self.cluster_environment, self._timeout)
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, store=store)
        if self.world_size > 1:
            self._watch = FailureWatch(self.world, self.cluster_environment.main_address, self._launcher)

    # Fit

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self._failed, self._fit, self._replicas = False, None, ()
        put_together(module, self._known)
        if trainer.state.fn != TrainerFn.FITTING:
            self._setup_evaluation(trainer)
            return
        self._later = self._trained = None
        self._resumes = False
        check_fit(trainer, module, self.world.size, self._layer_sync is not None, self._known)
        self._seed = self._setup_standalone(trainer, self._resumed_seed).seed
        if self._local:
            self.model_to_device()
        self.setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.world.size)
        self._names = names_in(self.optimizers[0], module)
        self.setup_precision_plugin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The first batch of a fit brings the shapes: now the step is captured, and the module distributed."""
        if self._fit is not None:
            self._fit.arrive(batch)
            return
        assert self._standalone is not None and self.lightning_module is not None
        self._names = names_in(self.optimizers[0], self.lightning_module, self._names)  # hooks may have changed it
        state = self._resumed_state()
        self._fit = fit = Fit(self._standalone, batch, self._verify, self.optimizers[0], self._names, self.precision_plugin)
        self._trained = fit.optimizer
        self._standalone, self._evaluation = None, None if self._local else fit.evaluation
        self._later, self._resumes = None, False
        if state is not None:
            self._load_optimizer(fit, {**state, "param_groups": fit.optimizer.full_groups()})
        _optimizers_to_device(self.optimizers, self.root_device)
        fit.record(self._profile)

    def _settings(self) -> Settings:
        """How to compile for this module; from here on the processes know their replicas."""
        assert self.lightning_module is not None
        program = for_fit(self._program, self.lightning_module)
        found = {} if self._local else replicas_of(program)
        self._replicas = tuple(found.get(rank, 0) for rank in range(self.world.size))
        context = self.precision_plugin.train_step_context
        return Settings(program, max(found.values(), default=0) + 1, self._verify != "off", context, self._local, self._timeout)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self._fit is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop.epoch_loop
        return self._fit.step(loop.total_batch_idx, loop.batch_idx, trainer.current_epoch, last=not self._accumulating)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The Trainer enters it for the batches of a gradient accumulation that are not the last one."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._watch is not None:
            self._watch.report(exception)

    def teardown(self) -> None:
        self._end_evaluation(self._failed)
        if self._fit is not None:
            self._fit.close(self._failed)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._resumed_seed = self._loading = None
        assert self.accelerator is not None and self.cluster_environment is not None
        module = self.lightning_module
        if module is not None and is_on_meta(module):
            # The module is still in parts, after a failure or as it was built, and what has no data cannot be moved.
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
        else:
            super().teardown()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole on the lead, with tensors without data for foreign parts on the others; with references
        to tensors, where checkpoints are sharded. Collective."""
        if self._fit is None or not self._sharded:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return module_state(self._fit, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one device would have it: whole on the lead, in part on the others; with references to tensors,
        where checkpoints are sharded. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._later is not None:
            if referenced(self._later):
                raise PiperError(
                    "PiperStrategy: a fit that resumes from a sharded checkpoint reads the optimizer's state when the first batch "
                    "has come, and cannot be saved before; save after the first step"
                )
            return {**super().optimizer_state(optimizer), "state": self._later["state"]}
        if self._trained is None or self._trained.optimizer is not optimizer:
            return super().optimizer_state(optimizer)
        return optimizer_state(self._fit) if self._fit is not None and self._sharded else self._trained.full_state()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise PiperError(f"the checkpoint holds the states of {len(states)} optimizers; resume one of a fit with a single one")
        assert self.lightning_module is not None
        if self._fit is None:
            self._names = names_in(self.optimizers[0], self.lightning_module, self._names)
        check_groups(self._names, states[0]["param_groups"])
        if self._fit is None:  # at once, for hooks may look at it and change it
            self._resumes = not referenced(states[0]) and not is_on_meta(self.lightning_module)
            self._later = None if self._resumes else states[0]
            self.optimizers[0].load_state_dict(states[0] if self._resumes else {**states[0], "state": {}})
        else:
            self._load_optimizer(self._fit, states[0])
            _optimizers_to_device(self.optimizers, self.root_device)

    def _resumed_state(self) -> State | None:
        """What the optimizer has when the first batch comes of a fit that resumes; None if none does."""
        return self.optimizers[0].state_dict() if self._resumes else self._later

    def _load_optimizer(self, fit: Fit, state: State) -> None:
        if self._loading is not None and referenced(state):
            self._loading.optimizer(state, fit)
        else:
            fit.optimizer.load_full_state(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loading is not None and referenced(checkpoint["state_dict"]):
            assert self.lightning_module is not None
            self._loaded = self._loading.module(self.lightning_module, checkpoint["state_dict"], strict, self._fit)
            return
        super().load_model_state_dict(checkpoint, strict)
        if self._fit is not None and self._fit.running:
            self._fit.ownership.load(self._loaded)
            self._loaded = {}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        world = self.world
        place, sharded = found_at(checkpoint_path, self.checkpoint_io, world)
        self._loading = Loading(place, world, weights_only is not False) if sharded else None
        if self._loading is None:
            content = read_plain(place, self.checkpoint_io, world, partial(super().load_checkpoint, place, weights_only))
        else:
            content = self._loading.content
        self._resumed_seed = seed_of(content)
        return content

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if self._seed is not None:
            checkpoint[KEY] = {"seed": self._seed}
        if self._fit is not None and self._sharded:
            assert self.lightning_module is not None
            check_target(filepath, storage_options, self.checkpoint_io)
            pieces = pieces_of(self._fit, self.lightning_module, referenced(checkpoint))
            save(filepath, pieces, checkpoint, self.world)
            return
        if self.is_global_zero:
            save_in_one_go(self.checkpoint_io, checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            remove_in_one_go(self.checkpoint_io, filepath)
