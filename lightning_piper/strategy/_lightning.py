"""The one file that uses Lightning's private names. Tried on Lightning 2.6; each entry says what is relied on.

- `Strategy._configure_launcher`: the Trainer calls it, once, when it knows the devices; `Strategy._launcher`: what the Trainer then
  lets run its entry points, if it is not None; that of this process alone, so no copy has its processes.
- `Strategy._lightning_module`: what the Trainer sets to the module of a run, before it looks whether it is compiled
  (`LightningModule._compiler_ctx`), which it allows with some strategies of its own alone.
- `ParallelStrategy._layer_sync`: what the Trainer sets for `sync_batchnorm=True`, or a plugin that it was given, else None.
- `Strategy._reset_optimizers_and_schedulers`: forgets the optimizers of an earlier fit.
- `Strategy._checkpoint_io`: the plugin, as it was given; `_WrappingCheckpointIO`: one that writes by another one.
- `_SubprocessScriptLauncher`: starts the script once more for each further device of this machine; `procs` has the processes.
- `_set_num_threads_if_needed`: gives each process of a machine its part of the cores, unless `OMP_NUM_THREADS` is set.
- `_init_dist_connection`: makes the default process group of a cluster environment, and ends it with the process if it is of NCCL.
- `_optimizers_to_device`: moves optimizers' states as Lightning's own strategies do.
- `_collect_rng_states`, `_set_rng_states`: the states of the random number generators of torch, numpy and Python.
- `_results` of a loop, and of the Trainer for the one that runs: what was logged, with the arguments of each `self.log` (`meta`).
- `_evaluation_loop`: the one that runs, also in a fit; its `_combined_loader` has the data loaders that `max_batches` counts.
- `WeightAveraging._average_model`: its `AveragedModel`, with a copy of the module, from `setup` on;
  `StochasticWeightAveraging._average_model`: the copy itself; `_avg_fn`: how it averages.
- `_HandlersCompose`: what a Trainer makes the handler of a signal, if there was none; that of SIGTERM in any case, of what
  there was and of `_SignalConnector._sigterm_notifier_fn`, which broadcasts on the default group and sets `received_sigterm`.
- `_broadcast_sigterm_tensor` of the loop over batches: before each batch, rank 0 tells all whether it has `received_sigterm`; then
  all raise `SIGTERMException`. After a batch and after an epoch, whoever has received it raises it, alone.
- `_can_stop_early` of the loop over epochs: it may end where `should_stop` is set; `_num_ready_batches_reached` of the one over
  batches: it has drawn all that its epoch has.
- `ThroughputMonitor._throughputs`: its measurements by stage, of which each knows how many devices there are.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from subprocess import Popen
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import _init_dist_connection as connect
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as divide_cores
from lightning.fabric.utilities.optimizer import _optimizers_to_device as move_optimizers
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import StochasticWeightAveraging, ThroughputMonitor, WeightAveraging
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_piper.compiler import Compiled
from lightning_piper.either_lightning import is_a, package_of
from lightning_piper.processes.progress import Progress, progress
from lightning_piper.session.replay import added

__all__ = [
    "Strategy",
    "collect_rng_states",
    "connect",
    "copy_of",
    "divide_cores",
    "forget_logs",
    "handler_of",
    "log_anew",
    "log_apart",
    "move_optimizers",
    "progress_of",
    "set_rng_states",
    "take_sigterm",
    "throughputs_of",
    "update_of",
]  # fmt: skip


class Strategy(ParallelStrategy):
    """Lightning's strategy over processes, with what it keeps to itself under names of its own."""

    num_nodes = 1

    @property
    def num_processes(self) -> int:
        """On this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        module: pl.LightningModule | None = vars(self).get("_lightning_module")
        return module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        if module is not None and module._compiler_ctx is not None:
            import_module(f"{package_of(module)}.utilities.compile").to_uncompiled(module)
            rank_zero_warn(
                "PiperStrategy: torch.compile(module) is taken apart, for the strategy captures the module's steps itself; for "
                "compiled code, give PiperStrategy(compile=True)"
            )
        vars(self)["_lightning_module"] = module

    def _configure_launcher(self) -> None:
        self.configure_launcher()

    def configure_launcher(self) -> None:
        """The devices are known: say what starts the processes, if this one is to start any."""

    def launch_script(self) -> None:
        """Start the script once more for each further device."""
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As in the base class, which asserts that the module is one of its own package's."""
        model = model or self.lightning_module
        return self.precision_plugin.optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """As in the base class, which gives plugins of its own package alone the plugin that they wrap if they have none."""
        if is_a(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = TorchCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def started(self) -> Sequence[Popen[Any]]:
        """The processes that this one has started."""
        return getattr(self._launcher, "procs", ())

    @property
    def layer_sync(self) -> LayerSync | None:
        return self._layer_sync

    @property
    def syncs_batch_norms(self) -> bool:
        return is_a(self._layer_sync, TorchSyncBatchNorm)

    def forget_optimizers(self) -> None:
        self._reset_optimizers_and_schedulers()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._launcher is not None:
            state["_launcher"] = copy.copy(self._launcher)
            state["_launcher"].procs = []
        return state


def forget_logs(trainer: pl.Trainer) -> None:
    """Of earlier runs: steps may run in another way than in these, and Lightning refuses values that are logged with another
    `sync_dist` than before."""
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in loops:
        loop._results.clear()


def evaluation_lengths(trainer: pl.Trainer) -> tuple[int | None, ...]:
    """How many batches each data loader of the evaluation that begins has in this process; None if only its end tells."""
    loop = trainer._evaluation_loop
    assert loop._combined_loader is not None
    loaders = zip(loop._combined_loader.flattened, loop.max_batches, strict=True)
    return tuple(None if sized_len(loader) is None else int(count) for loader, count in loaders)


def log_anew(trainer: pl.Trainer) -> None:
    """What the loop that runs logs from now on may be given other arguments than before, of which nothing is kept. Those of a
    capture are without `sync_dist`, and Lightning refuses a change. A loop that predicts logs nothing."""
    results = trainer._results
    if results is not None:
        results.clear()


def log_apart(trainer: pl.Trainer, step: str, captures: Sequence[Compiled], processes: int) -> None:
    """Each process is to log values of its own batches, where all had those of the whole batch so far: of these, each process keeps
    its share, so that they count as much as they did.

    Args:
        step: name of the one that runs.
        captures: of it.
        processes: how many there are.
    """
    logs = [log for compiled in captures for log in compiled.dag.code.logs]
    synced = {log.name for log in logs if log.kwargs.get("sync_dist")}
    sums = {name for compiled in captures for name in added(compiled.dag)}
    results = trainer._results
    if step == "training_step":
        results = trainer.fit_loop.epoch_loop._results
        trainer.fit_loop.epoch_loop.val_loop._results.clear()
    for metric in results.values() if results is not None else ():
        if metric.meta.fx != step or not metric.is_tensor:
            continue
        metric.meta.sync.should = processes > 1 and metric.meta.name in synced
        if metric.meta.is_mean_reduction or (metric.meta.is_sum_reduction and metric.meta.name in sums):
            metric.value = metric.value / processes
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size / processes


def handler_of(number: int) -> Callable[[int, FrameType | None], Any] | None:
    """A Trainer's handler of a signal; None if it has another one."""
    found = signal.getsignal(number)
    return found if is_a(found, _HandlersCompose) else None  # type: ignore[return-value]


def take_sigterm(
    trainer: pl.Trainer, handler: Callable[[int, FrameType | None], object], due: Callable[[], str | None]
) -> Callable[[], object] | None:
    """Let this handle SIGTERM instead of the Trainer, beside the handlers that there were before it. Returns what gives it back;
    None where the Trainer has set no handler that is still its own.

    Args:
        due: asked before each batch on rank 0, which tells all; what it says ends them.
    """
    found, loop = handler_of(signal.SIGTERM), trainer.fit_loop.epoch_loop
    handlers: list[Any] = [] if found is None else found.signal_handlers  # type: ignore[attr-defined]
    own = trainer._signal_connector._sigterm_notifier_fn
    if own not in handlers:
        return None
    handlers[handlers.index(own)] = handler

    def tell() -> None:
        if trainer.is_global_zero and (why := due()) is not None:
            rank_zero_info(why)
            trainer._signal_connector.received_sigterm = True
        type(loop)._broadcast_sigterm_tensor(loop)

    vars(loop)["_broadcast_sigterm_tensor"] = tell
    return lambda: vars(loop).pop("_broadcast_sigterm_tensor", None)


def progress_of(trainer: pl.Trainer) -> Progress | None:
    """How far a fit has come; asked by another thread than the one that trains."""
    if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
        return None
    loop = trainer.fit_loop.epoch_loop
    counts: Any = loop.batch_progress.current  # declared as trackers that count less than these
    epochs: Any = trainer.fit_loop.epoch_progress.current
    done = loop.batch_progress.total.completed
    if epochs.ready > epochs.started:  # the counts are of the epoch before
        return progress(done, epochs.ready, 0)
    left, over = None, False
    if counts.processed == counts.ready > counts.started:
        left = "its on_train_batch_start returned -1"
    elif counts.completed == counts.ready > 0:
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            left, over = "its trainer.should_stop was set", True
        elif 0 <= loop.max_steps <= loop.global_step:
            left, over = f"it had done max_steps={loop.max_steps}", True
        elif loop._num_ready_batches_reached() or epochs.processed == epochs.ready:
            left = "its data had ended"
    return progress(done, epochs.ready, counts.completed, left, over)


def throughputs_of(monitor: ThroughputMonitor) -> Iterable[Throughput]:
    return monitor._throughputs.values()


def copy_of(callback: WeightAveraging | StochasticWeightAveraging) -> torch.nn.Module | None:
    """The copy of the module in which a callback averages its weights; None outside of a fit."""
    found = callback._average_model
    return found.module if isinstance(found, AveragedModel) else found


def update_of(callback: WeightAveraging | StochasticWeightAveraging) -> Callable[[torch.nn.Module, torch.nn.Module], None]:
    """How a callback averages: an average by the current values, as the third ones."""
    found = callback._average_model
    if isinstance(found, AveragedModel):
        avg_fn, multi_avg_fn = found.avg_fn, found.multi_avg_fn

        def update(average: torch.nn.Module, current: torch.nn.Module) -> None:
            made = AveragedModel(average, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn)
            made.module = average
            made.n_averaged += 2
            made.update_parameters(current)

        return update
    swa: Any = callback
    return lambda average, current: swa.update_parameters(average, current, torch.tensor(2), swa._avg_fn)
