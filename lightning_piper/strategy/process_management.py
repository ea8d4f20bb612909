"""The part of `PiperStrategy` that manages processes: the number of processes, their start, and their
collectives."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from subprocess import Popen
from types import FrameType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_piper.accelerators._torch_groups import destroy_all_groups
from lightning_piper.accelerators.kinds import check_kind
from lightning_piper.checkpoint.memory_copy import MEMORY, MemoryCopies
from lightning_piper.common.lightning_packages import is_a
from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.processes import launcher_checks
from lightning_piper.processes.batch_join import BatchJoin
from lightning_piper.processes.failure import HERE, FailureWatch, waited
from lightning_piper.processes.heap import give_freed_memory_back, keep_freed_memory
from lightning_piper.processes.spares import SPARE, Spares, end_spare
from lightning_piper.processes.termination import Termination
from lightning_piper.processes.tracebacks import print_short_tracebacks
from lightning_piper.processes.world import (
    RANK_ZERO,
    SoleWorld,
    World,
    end_groups_at_exit,
    leave_groups_at_exit,
    store_of_attempt,
)
from lightning_piper.runtime.connections import noted_connections
from lightning_piper.runtime.same_machine.pipes import close_pipes
from lightning_piper.session.local_sgd import LocalSGD
from lightning_piper.session.programs import KeptCaptures
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.checks import checked_backend
from lightning_piper.strategy.loading.data import agree_on_loader
from lightning_piper.strategy.loading.loaders import Loaders
from lightning_piper.strategy.phases import Ended, Fitting, Idle, Phase, copied
from lightning_piper.strategy.spares._lightning import (
    BeforeFit,
    SpareLauncher,
    end_fit,
    launching,
    warming_up,
)
from lightning_piper.strategy.spares.checks import check_spares

T = TypeVar("T")


class OverProcesses(_lightning.Strategy):
    """A strategy with one process for each logical device, or one process for all of them.

    Args:
        local: Whether one process has all devices.
        local_sgd: The settings of local SGD; None without it.
        timeout: Timeout of communication.
        backend: Backend of the default process group; None for the device's default backend.
        spares: Number of spares, which replace processes that are lost.
        options: Arguments of Lightning's own strategies.

    Attributes:
        phase: The current phase of a run. `phase.replicas` has the replica that each process draws data for.
    """

    def __init__(
        self,
        local: bool,
        local_sgd: LocalSGD | None,
        timeout: timedelta,
        backend: str | None,
        spares: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._local, self._timeout, self._backend = local, timeout, backend
        self._local_sgd = local_sgd
        self.phase: Phase = Idle()
        self._failed = False  # whether the run has failed
        # Joins the batches of processes that work on one batch although each of them draws its own data.
        self._join: BatchJoin | None = None
        self._alone = False  # whether each process now evaluates only its own samples
        self._watch: FailureWatch | None = None
        self._termination: Termination | None = None
        self._loaders = Loaders()
        self._at_end = contextlib.ExitStack()  # restores what a run has replaced, such as Lightning's handler
        self._spare_count = spares
        self._spares: Spares | None = None  # None without spares, and before the first run
        self._copies: MemoryCopies | None = (
            None  # copies of the state of a fit; None if no spare can continue it
        )
        self._captures: KeptCaptures | None = None  # None without spares, and before the first run
        # Whether the fit is the warm-up of a spare, which ends when the step is captured.
        self._warms_up = False
        self._keeps_memory = False  # whether this run has called `keep_freed_memory`

    def __getstate__(self) -> dict[str, Any]:
        phase = copied(self.phase, 1 if self._local else self.world_size)
        return {
            **super().__getstate__(),
            "phase": phase,
            "_watch": None,
            "_termination": None,
            "_spares": None,
            "_copies": None,
            "_captures": None,
            "_join": None,
            "_at_end": contextlib.ExitStack(),
        }

    @property
    def is_distributed(self) -> bool:
        """Whether processes read different data. If so, Lightning adds a distributed sampler to each data
        loader, which may shuffle although the user does not.

        Without replicas, all processes read the same data in the user's order, unless their batches are
        joined.
        """
        apart = self._join is not None or self._local_sgd is not None
        return apart or max(self.phase.replicas, default=0) > 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._drawing.count, "rank": self._drawing.replica}

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self._all_of(self.phase.replicas)

    @property
    def program_world(self) -> World:
        """The processes that run one program: all processes, or the processes of this local replica."""
        return self._world_of(self.phase.replicas)

    @property
    def _drawing(self) -> World:
        """The processes, each with the replica that it draws data for."""
        return self.world if self._join is None else self._world_of(tuple(range(self.world_size)))

    @property
    def counted(self) -> World:
        """The processes, each with its replica in metrics and reductions. While each process evaluates only its
        own samples, this is the replica that it draws data for.
        """
        return self._drawing if self._alone else self.world

    def _joined(self, batch: Any) -> Any:
        """Join the batches that the processes of this replica have drawn, and return the result. Return
        `batch` if each process has drawn the batch of its replica. Collective."""
        return batch if self._join is None else self._join.joined(batch)

    def _all_of(self, replicas: tuple[int, ...]) -> World:
        """Return all processes of the run.

        Args:
            replicas: The replica of each process of a program. Each local replica of local SGD runs the program
                and has replicas of its own.
        """
        if self._local_sgd is None:
            return self._world_of(replicas)
        own = replicas or (0,) * self._program_size
        every = (first * (max(own) + 1) + each for first in range(self._local_sgd.replicas) for each in own)
        return World(self.global_rank, self.world_size, self.root_device, self._timeout, tuple(every))

    def _world_of(self, replicas: tuple[int, ...]) -> World:
        """Return the processes that run one program: all processes, or the processes of this local replica."""
        size = self._program_size
        first = self._local_replica * size
        members = range(first, first + size)
        kind = SoleWorld if self._warms_up else World
        return kind(self.global_rank - first, size, self.root_device, self._timeout, replicas, members)

    @property
    def _program_size(self) -> int:
        """The number of processes that run one program."""
        if self._local:
            return 1
        return self.world_size if self._local_sgd is None else self._local_sgd.processes(self.world_size)

    @property
    def _local_replica(self) -> int:
        """The index of this process's local replica; 0 without local SGD."""
        return 0 if self._local_sgd is None else self.global_rank // self._program_size

    # Start and end

    def set_world_ranks(self) -> None:
        """Set the ranks. The Trainer calls this as soon as it knows the devices."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for only in (rank_zero_only, fabric_rank_zero_only):
            only.rank = self.global_rank  # type: ignore[attr-defined]

    def configure_launcher(self) -> None:
        """Start the other processes with Lightning's launcher, unless there is one process or the cluster
        starts them.

        Raises:
            PiperError: The launcher cannot start the script again, or `transport="local"` has several
                devices.
        """
        if self._local:
            launcher_checks.check_one_process(self.num_processes, self.num_nodes)
            return
        if self._local_sgd is not None:
            self._local_sgd.processes(self.num_processes * self.num_nodes)
        assert self.cluster_environment is not None
        if self._spare_count:
            self.cluster_environment = launching(self.cluster_environment)
            self.set_world_ranks()
            check_spares(self.cluster_environment, self.num_processes, self.num_nodes, self.root_device)
        # A single process needs no launcher. Lightning's launcher, which starts scripts, fails in a notebook.
        environment, spares = self.cluster_environment, self._spare_count
        starts = not environment.creates_processes_externally
        if starts and self.num_processes > 1:
            launcher_checks.check_script()
        if spares:
            run, watched = self._run_with_spares, self._is_watched
            self.launch_with(SpareLauncher(environment, self.num_processes, spares, run, watched))
        elif starts and self.num_processes * self.num_nodes > 1:
            self.launch_script()

    def setup_environment(self) -> None:
        """Connect the processes, and start the watches for failures and signals. With all devices in one
        process, there is nothing to connect.

        Raises:
            PiperError: The settings do not fit the transport, or processes cannot reach each other.
        """
        assert self.cluster_environment is not None
        if self._local and (started := self.cluster_environment.world_size()) != 1:
            raise PiperError(
                f"PiperStrategy: transport='local' and 'simulated' run in one process, but "
                f"{type(self.cluster_environment).__name__} has {started}. Start one process: python train.py, in a job of SLURM "
                "with --ntasks=1 [PIPER-S003]"
            )
        super().setup_environment()
        check_kind(self.root_device)
        self._keeps_memory = self.root_device.type == "cpu" and keep_freed_memory()
        if self._local:
            return
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # Lightning's launcher divides the cores only in the process that starts all other processes.
        _lightning.divide_cores(self.num_processes)
        self.set_world_ranks()
        if self._warms_up:
            return
        launcher_checks.check_size(self.world_size)
        backend = checked_backend(self._backend, self.root_device, self.world_size)
        environment = self.cluster_environment
        if self.num_nodes > 1:
            launcher_checks.check_address(environment.main_address)
        end_groups_at_exit(default=not dist.is_initialized())
        spares = self._spares
        with nullcontext() if spares is None else spares.connecting(self.started):
            with noted_connections():
                if spares is None:
                    store = store_of_attempt(environment.main_address, environment.main_port, self._timeout)
                else:  # a later entry point of the Trainer uses the groups of the first
                    store = None if dist.is_initialized() else spares.group_store()
                _lightning.connect(environment, backend, timeout=self._timeout, store=store)
            if self.world_size > 1:
                assert self.lightning_module is not None
                progress = partial(_lightning.progress_of, self.lightning_module.trainer)
                host = HERE if self.num_nodes == 1 else environment.main_address
                self._watch = FailureWatch(self.world, host, self.started, progress)
                goes_on = spares is not None and (spares.left or self._runs_on(self.world_size - 1))
                if self._copies is not None and goes_on:
                    self._watch.replaces = self._timeout.total_seconds()
                self._termination = Termination(self.global_rank, self._watch, SIGTERMException)

    def _run_with_spares(
        self, trainer: pl.Trainer, enter: Callable[[str | None], T], waiting: list[Popen[Any]]
    ) -> T:
        """Run an entry point of the Trainer. If a fit loses a process, let a spare replace it, and run the fit again
        from the copy of its state. In a spare, first wait until it replaces a process.

        Args:
            trainer: The Trainer.
            enter: Runs the entry point. It takes the path of a checkpoint; None for the user's path, "" for no
                checkpoint.
            waiting: The spares, on rank 0.

        Raises:
            PiperError: The first entry point is not `fit`.
        """
        if self._spares is not None or dist.is_initialized():
            return enter(None)  # the spares have ended with an earlier entry point
        if (call := trainer.state.fn) not in (None, TrainerFn.FITTING):
            raise PiperError(
                f"PiperStrategy(spares={self._spare_count}): spares wait in the Trainer's first call, which must be "
                f"fit, but it is {call.value}. Call fit first, or remove spares [PIPER-S003]"
            )
        assert self.cluster_environment is not None
        address = self.cluster_environment.main_address, self.cluster_environment.main_port
        counts = self.world_size, self._spare_count
        self._spares = spares = Spares(*address, *counts, self.is_global_zero, self._timeout, self._runs_on)
        self._captures, path, taken = KeptCaptures(), None, None
        spares.waiting = waiting
        before = BeforeFit(trainer)
        if SPARE in os.environ:
            if spares.wait_to_prepare():
                self._warm_up(trainer, enter)
                before.restore()
            taken, path = spares.wait_for_rank(), MEMORY
            if taken is None:
                end_spare()
            del os.environ[SPARE]
        self._copies = MemoryCopies(spares.files, self._is_lost)
        if taken is not None:
            self._continue_on(*taken)
        try:
            while True:
                try:
                    return enter(path)
                except Exception as error:
                    if not self._replaced(trainer, error):
                        raise
                before.restore()
                path = MEMORY
        finally:
            self._copies = self._captures = None
            spares.end()

    def _warm_up(self, trainer: pl.Trainer, enter: Callable[[str | None], object]) -> None:
        """In a spare, begin the fit without the other processes, and end it when the step is captured. This capture
        saves time when the process takes a rank."""
        self._warms_up = True
        try:
            with warming_up(trainer):
                self._failed = True
                enter("")
        finally:
            self._warms_up = False
        gc.collect()  # now, and not while other processes wait for this one

    @abstractmethod
    def _runs_on(self, processes: int) -> bool:
        """Return whether each process has a replica, and the fit can continue on fewer processes. A searched program
        cannot, because the processes may have stages."""

    def _is_watched(self) -> bool:
        """Return whether this strategy ends the run, or replaces a process, if a process fails."""
        copies = self._copies  # another thread calls this method
        return self._watch is not None or (copies is not None and copies.number >= 0)

    def _is_lost(self) -> bool:
        """Return whether a process of the run has failed."""
        return self._watch is None or self._watch.judged

    def _replaced(self, trainer: pl.Trainer, error: Exception) -> bool:
        """After an error of a fit, return whether processes were lost and spares have replaced them. Then the fit can run
        again. All processes that are left call this method."""
        assert self._spares is not None and self._copies is not None
        lost = None
        if self._watch is not None:
            self._watch.report(error)
            lost = self._watch.lost
        # Without a watch, a process was lost while the processes connected again.
        replaceable = waited(error) and (self._watch is None or lost not in (None, RANK_ZERO))
        ranks: list[int] | None = []
        if self.is_global_zero:
            if replaceable and self._copies.number >= 0:
                ranks = self._spares.replace(self.started, () if lost is None else (lost,))
            if not ranks:
                self._spares.refuse()
                return False
        elif not replaceable:
            return False
        self._failed = True
        end_fit(trainer)
        if isinstance(self.phase, Ended):
            self.phase.fit.ownership.abandon()
        destroy_all_groups()
        close_pipes()  # another process may wait for this process, and not for the lost one
        if not self.is_global_zero:
            stay = self._spares.join(self.global_rank)
            if stay is not None:
                self._continue_on(self.global_rank, stay)
            return stay is not None
        gathered = self._spares.gather(self.started)
        if not ranks or gathered is None:
            return False
        more, stay = gathered
        on, before, left = counted(len(stay), "process"), self.num_processes, self._spares.left
        fewer = f" A global batch now has the samples of {on} instead of {before}." * (len(stay) < before)
        warnings.warn(
            f"PiperStrategy: the fit has lost ranks {sorted({*ranks, *more})}. The fit continues on {on} from the copies "
            f"in memory, before batch {self._copies.number}.{fewer} The run has {counted(left, 'spare')} left [PIPER-W033]",
            stacklevel=2,
        )
        self._continue_on(0, stay)
        return True

    def _continue_on(self, rank: int, stay: Sequence[int]) -> None:
        """Take part in the new generation of processes.

        Args:
            rank: The rank of this process before, or the rank that this spare takes.
            stay: As `Spares.join` returns it.
        """
        assert self._copies is not None and self.parallel_devices is not None
        self._copies.continue_on(stay)
        if len(stay) < self.num_processes:
            self._captures = KeptCaptures()  # of batches of more replicas
            self.parallel_devices = self.parallel_devices[: len(stay)]
        os.environ["LOCAL_RANK"] = str(stay.index(rank))  # `setup_environment` sets all ranks

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True
        leave_groups_at_exit()
        failed_first = self._watch is not None and self._watch.report(exception)
        one_line = not (self.global_rank == 0 or failed_first)
        print_short_tracebacks(self.global_rank, one_line, exception)

    def _take_sigterm(self, trainer: pl.Trainer) -> None:
        if self._termination is None:
            return
        handle, due = self._termination.handle, self._termination.due
        given_back = _lightning.take_sigterm(trainer, handle, due, self._meets, self._announce)
        if given_back is not None:
            self._termination.begin()
            self._at_end.callback(given_back)

    def _meets(self) -> bool:
        """Return whether all processes communicate between two batches: always, but under local SGD only after an
        exchange."""
        rounds = self.phase.rounds if isinstance(self.phase, Fitting) else None
        return rounds is None or rounds.is_between

    def _announce(self, flag: bool) -> bool:
        """Return rank 0's flag, or True if only the default group can tell it. Collective."""
        return not isinstance(self.phase, Fitting) or self.phase.fit.announce(flag)

    def _end_run(self) -> None:
        """Restore the objects that the run has replaced, such as Lightning's handler. Stop the watches for
        failures and signals, and return freed memory to the system."""
        self._at_end.close()
        if self._termination is not None:
            self._termination.end()
            self._termination = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._loaders.end()
        if self._keeps_memory:
            give_freed_memory_back()
            self._keeps_memory = False

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer, stage = self.lightning_module.trainer, self.lightning_module.trainer.state.stage
        self._take_sigterm(trainer)  # Lightning requests loaders as soon as it has set its signal handlers
        limit = 1.0 if stage is None else getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        agree_on_loader(dataloader, self._drawing, limit, apart=stage != RunningStage.TRAINING)
        if stage == RunningStage.TRAINING:
            self._loaders.attach(dataloader, trainer, self._drawing, self._at_end)
        return dataloader

    # Collectives. Reductions are over replicas, because the processes of one replica have the same values.

    def reduce(
        self, tensor: torch.Tensor | Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> torch.Tensor | Any:
        return self.counted.over_replicas(tensor, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.world.decide(decision, all)

    def all_gather(
        self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return tensor if self._local else super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        if self._local or not dist.is_initialized():
            return
        dist.barrier(group=self.world.host_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._local or not dist.is_initialized():
            return obj
        return self.world.broadcast(obj, src)


class Requeue(pl.Callback):
    """A callback that saves a checkpoint and requeues a SLURM job before its time ends.

    Lightning saves in the signal handler, wherever the process is, even in the middle of a step. Other
    processes wait for messages of that step, and would not join a save that needs all processes. So this
    callback only records the signal. Lightning's handler then runs on all processes at the end of the same
    batch, after all other callbacks.

    Args:
        requeue: Lightning's handler; None if the run must not be requeued.
        world: The processes; None if the run must not be requeued.
        meets: Returns whether all processes communicate now.

    Attributes:
        saves: Whether the handler is running. The handler's checkpoint must be complete when the handler
            returns, because the job ends then.
    """

    def __init__(
        self,
        requeue: Callable[[], object] | None = None,
        world: World | None = None,
        meets: Callable[[], bool] = lambda: True,
    ) -> None:
        self._requeue, self._world, self._meets = requeue, world, meets
        self._told = False
        self._steps = 0  # the Trainer's steps at the last check
        self.saves = False

    @classmethod
    def of(cls, trainer: pl.Trainer, world: World, meets: Callable[[], bool]) -> Requeue:
        """Replace Lightning's handler of the requeue signal until the end of the run. Give the Trainer a
        callback that calls Lightning's handler, and return this callback.

        At the end of the run, the Trainer restores the handlers from before. If the run is not a SLURM job to
        requeue, or the handler is not Lightning's, nothing is replaced or added. The returned callback then
        does nothing. A `Requeue` of an earlier run is removed from the Trainer in every case.
        """
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Requeue)]
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if (
            not is_a(environment, SLURMEnvironment)
            or not environment.auto_requeue
            or environment.requeue_signal is None
        ):
            return cls()
        number = environment.requeue_signal
        handler = _lightning.handler_of(number)
        if handler is None:  # the handler is the user's, which Lightning keeps
            return cls()
        taken = cls(partial(handler, number, None), world, meets)
        signal.signal(number, taken.note)
        callbacks.append(taken)
        return taken

    def __reduce__(self) -> Any:
        return Requeue, ()  # A signal concerns one process, so a copy starts without it.

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal."""
        self._told = True

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """If a process has received the signal, save and requeue. The method checks for the signal, which is
        collective, after each batch, or after each exchange of local SGD. While batches are accumulated, it checks
        only after a step of the optimizer, so that no accumulated gradient is lost. The last batch of an epoch ends
        an accumulation."""
        if self._requeue is None or self._world is None or not self._meets():
            return
        if trainer.accumulate_grad_batches > 1 and trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if not self._world.decide(self._told, all=False):
            return
        self._told, self.saves = False, True
        try:
            self._requeue()
        finally:
            self.saves = False
