"""The only module that uses Lightning's private names, except `spares._lightning`, tested with Lightning 2.6. Each entry
says which behavior it relies on.

- `Strategy._configure_launcher`: the Trainer calls it once, when it knows the devices. `Strategy._launcher`:
  if it is not None, the Trainer runs its entry points through the launcher. A copy of the strategy gets a
  launcher without child processes.
- `Strategy._lightning_module`: the Trainer sets it to the module of a run, before it checks whether the
  module is compiled (`LightningModule._compiler_ctx`). Lightning allows compiled modules only with some of
  its own strategies.
- `ParallelStrategy._layer_sync`: the Trainer sets it for `sync_batchnorm=True`, or to the user's plugin;
  otherwise it is None.
- `Strategy._reset_optimizers_and_schedulers`: removes the optimizers of an earlier fit.
- `Strategy._checkpoint_io`: the user's plugin, unchanged. `_WrappingCheckpointIO`: a plugin that writes
  through another plugin.
- `_SubprocessScriptLauncher`: starts the script once more for each further device of this machine. `procs`
  has the processes.
- `_set_num_threads_if_needed`: gives each process of a machine its share of the cores, unless
  `OMP_NUM_THREADS` is set.
- `_init_dist_connection`: creates the default process group of a cluster environment. With NCCL it destroys
  the group at the end of the process.
- `_optimizers_to_device`: moves optimizer states as Lightning's own strategies do.
- `_collect_rng_states`, `_set_rng_states`: the states of the random number generators of torch, numpy and
  Python.
- `_results` of a loop, and of the Trainer for the running loop: the logged values, with the arguments of each
  `self.log` (`meta`).
- `_evaluation_loop`: the running evaluation loop, also in a fit. Its `_combined_loader` has the data loaders
  that `max_batches` counts.
- `WeightAveraging._average_model`: its `AveragedModel`, with a copy of the module, from `setup` on.
  `StochasticWeightAveraging._average_model`: the copy itself. `_avg_fn`: its averaging function.
- `_HandlersCompose`: the signal handler that a Trainer installs if there was none. For SIGTERM it always
  installs one, made of the earlier handler and of `_SignalConnector._sigterm_notifier_fn`, which broadcasts
  on the default group and sets `received_sigterm`.
- `_broadcast_sigterm_tensor` of the loop over batches: before each batch, rank 0 broadcasts whether it has
  `received_sigterm`. If so, all processes raise `SIGTERMException`. After a batch and after an epoch, a
  process that has received SIGTERM raises the exception alone.
- `_can_stop_early` of the loop over epochs: whether the loop may end when `should_stop` is set.
  `_num_ready_batches_reached` of the loop over batches: whether it has drawn all batches of its epoch.
- `_restarting` of the loop over epochs: whether the epoch resumes, so that schedulers with `reduce_on_plateau` are not
  updated at its end. `resumed_on_epoch_end`: whether the checkpoint was saved by a hook `on_train_epoch_end`.
  `_callback_metrics` of `_logger_connector`: the latest logged values.
- `advance` of the loop over batches calls the module's `on_train_batch_start` before the strategy's. It holds the
  result in its variable `response`. If it is -1, the process skips the rest of its epoch.
- `Precision._after_closure(model, optimizer)`: called in each optimizer step, between the closure and the
  update. It calls `on_before_optimizer_step` and clips the gradients.
- `_combined_loader` of the loop over epochs: the loaders of a fit, with its `_mode` and the iterators of the
  running epoch (`_iterator`). `_num_yielded` of a `DataLoader`'s iterator (torch): the batches that it has
  given.
- `_data_fetcher` of the loop over epochs: draws the batches. If their number is not known, it draws each batch
  before the step of the previous batch, and keeps it in `batches`. It calls `next` of its `iterator`.
- `combined_loader` in the state of the loop over epochs: states of loaders, of rank 0 alone.
- `DistributedSamplerWrapper.dataset._sampler`: the user's sampler, whose samples Lightning divides.
  `_sampler_list`: all samples of its current iteration.
- `_Stateful`: the protocol of loaders with `state_dict` and `load_state_dict`.
- `_set_sampler_epoch`: calls `set_epoch` of a loader's samplers.
- `ThroughputMonitor._throughputs`: its measurements by stage. Each has the number of devices.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from subprocess import Popen
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.distributed import _init_dist_connection as connect
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as divide_cores
from lightning.fabric.utilities.optimizer import _optimizers_to_device as move_optimizers
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.fabric.utilities.throughput import Throughput
from lightning.fabric.utilities.types import _Stateful as Stateful
from lightning.pytorch.callbacks import StochasticWeightAveraging, ThroughputMonitor, WeightAveraging
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_piper.common.lightning_packages import is_a, is_exactly, package_of
from lightning_piper.compiler import Compiled
from lightning_piper.processes.progress import Progress, progress
from lightning_piper.session.replay import added

__all__ = [
    "Stateful",
    "Strategy",
    "before_updates",
    "collect_rng_states",
    "connect",
    "continue_monitoring",
    "copy_of",
    "divide_cores",
    "forget_logs",
    "handler_of",
    "log_anew",
    "log_apart",
    "monitored",
    "move_optimizers",
    "progress_of",
    "set_rng_states",
    "set_sampler_epoch",
    "skips_epoch",
    "take_sigterm",
    "throughputs_of",
    "update_of",
]  # fmt: skip


class Strategy(ParallelStrategy):
    """Lightning's strategy over processes, with public names for the private parts of Lightning that Piper
    uses."""

    num_nodes = 1

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine; 0 before the devices are known."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def _set_module(self, module: pl.LightningModule | None) -> None:
        if module is not None and module._compiler_ctx is not None:
            import_module(f"{package_of(module)}.utilities.compile").to_uncompiled(module)
            rank_zero_warn(
                "PiperStrategy ignores torch.compile(module). For compiled kernels, use PiperStrategy(compile=True). If a "
                "step runs uncaptured, compile submodules instead, such as self.net = torch.compile(self.net) [PIPER-W019]"
            )
        self._module_of_run = module

    # A step reads it about 50 times, so the getter is not a Python function.
    _lightning_module = property(attrgetter("_module_of_run"), _set_module)
    _module_of_run: pl.LightningModule | None = None

    def _configure_launcher(self) -> None:
        self.configure_launcher()

    def configure_launcher(self) -> None:
        """Choose how the processes start, if this process starts any. The Trainer calls this when it knows
        the devices."""

    def launch_script(self) -> None:
        """Create the launcher that starts the script once more for each further device of this machine."""
        assert self.cluster_environment is not None
        self.launch_with(
            _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        )

    def launch_with(self, launcher: _Launcher) -> None:
        """Let the Trainer run its entry points through a launcher."""
        self._launcher = launcher

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run an optimizer's step as the base class does, but accept modules of both Lightning packages.

        The base class asserts that the module's class comes from its own package.
        """
        model = model or self.lightning_module
        return self.precision_plugin.optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint plugin, as in the base class. A plugin that wraps no other plugin writes through
        `TorchCheckpointIO`.

        The base class does this only for wrapping plugins of its own package.
        """
        if is_a(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = TorchCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def started(self) -> list[Popen[Any]]:
        """The processes that this process has started, in the order of their ranks."""
        return getattr(self._launcher, "procs", [])

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


def before_updates(plugin: Precision, check: Callable[[Optimizer], None]) -> Callable[[], object]:
    """Call `check` with the optimizer before each update, after hooks and clipping. Return a function after
    which this ends."""
    own = plugin._after_closure

    def after_closure(model: Any, optimizer: Any) -> None:
        own(model, optimizer)
        check(optimizer)

    vars(plugin)["_after_closure"] = after_closure
    return lambda: vars(plugin).pop("_after_closure", None)


def forget_logs(trainer: pl.Trainer) -> None:
    """Clear the logged values of earlier runs.

    In this run, steps may run captured that ran uncaptured before, and the reverse. Their logs then differ in
    `sync_dist`, which Lightning rejects for a value that was logged before.
    """
    loops = (
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
    )
    for loop in loops:
        loop._results.clear()


def evaluation_lengths(trainer: pl.Trainer) -> tuple[int | None, ...]:
    """Return the number of this process's batches for each data loader of the evaluation that begins, such as
    `(10, None)`. None is for a loader whose length is not known."""
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    assert loop._combined_loader is not None
    loaders = zip(loop._combined_loader.flattened, loop.max_batches, strict=True)
    return tuple(None if sized_len(loader) is None else int(count) for loader, count in loaders)


def log_anew(trainer: pl.Trainer) -> None:
    """Clear the values that the running loop has logged, so that later logs may have different arguments.

    Captured steps log without `sync_dist`, and Lightning rejects a change of `sync_dist` for a logged value.
    A predict loop logs nothing.
    """
    results = trainer._results
    if results is not None:
        results.clear()


def log_apart(trainer: pl.Trainer, step: str, captures: Sequence[Compiled], replicas: int) -> None:
    """Prepare logged values for a step that was captured and now runs uncaptured, so that each replica logs
    only its own batches.

    Each replica has logged the values of the whole batch before. Now each replica keeps a share of these
    values, so that their total weight stays the same. The function divides the accumulated value and weight
    of a mean, and a sum over samples, by the number of replicas. Other sums are the same on every replica.

    From now on, Lightning reduces a value over replicas if the step logs it with `sync_dist=True`.

    For the training step, the values of the validation loop are cleared, because Lightning rejects a change
    of `sync_dist` for a logged value.

    Args:
        step: Name of the running step.
        captures: The captures of this step; empty if it has run uncaptured since the fit began.
        replicas: The number of replicas that draw batches of their own.
    """
    logs = [log for compiled in captures for log in compiled.dag.code.logs]
    synced = {log.name for log in logs if log.kwargs.get("sync_dist")}
    sums = {name for compiled in captures for name in added(compiled.dag)}
    results = trainer._results
    if step == "training_step":
        results = trainer.fit_loop.epoch_loop._results
        trainer.fit_loop.epoch_loop.val_loop._results.clear()
    for metric in results.values() if captures and results is not None else ():
        if metric.meta.fx != step or not metric.is_tensor:
            continue
        metric.meta.sync.should = replicas > 1 and metric.meta.name in synced
        if metric.meta.is_mean_reduction or (metric.meta.is_sum_reduction and metric.meta.name in sums):
            metric.value = metric.value / replicas
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size / replicas


def handler_of(number: int) -> Callable[[int, FrameType | None], Any] | None:
    """Return the Trainer's handler of a signal; None if another handler is installed."""
    found = signal.getsignal(number)
    return found if is_a(found, _HandlersCompose) else None  # type: ignore[return-value]


def take_sigterm(
    trainer: pl.Trainer,
    handler: Callable[[int, FrameType | None], object],
    due: Callable[[], str | None],
    meets: Callable[[], bool],
    announce: Callable[[bool], bool],
) -> Callable[[], object] | None:
    """Replace the Trainer's SIGTERM handler. Handlers that were installed before the Trainer's stay.

    Args:
        handler: The new handler.
        due: Called before each batch on rank 0; returns the reason why all processes must end before this
            batch, or None.
        meets: Called before each batch on every rank; returns whether all processes communicate now. If not, the
            end waits for a later batch.
        announce: Called then on every rank with its `received_sigterm`; returns whether rank 0 may have passed True,
            so that all processes must communicate as in Lightning.

    Returns:
        A function after which rank 0 no longer calls `due`; None if the Trainer's handler is not installed.
    """
    found, loop = handler_of(signal.SIGTERM), trainer.fit_loop.epoch_loop
    handlers: list[Any] = [] if found is None else found.signal_handlers  # type: ignore[attr-defined]
    own = trainer._signal_connector._sigterm_notifier_fn
    if own not in handlers:
        return None
    handlers[handlers.index(own)] = handler

    def tell() -> None:
        if not meets():
            return
        if trainer.is_global_zero and (why := due()) is not None:
            rank_zero_info(why)
            trainer._signal_connector.received_sigterm = True
        if announce(trainer.received_sigterm):
            type(loop)._broadcast_sigterm_tensor(loop)

    vars(loop)["_broadcast_sigterm_tensor"] = tell
    return lambda: vars(loop).pop("_broadcast_sigterm_tensor", None)


def progress_of(trainer: pl.Trainer) -> Progress | None:
    """Return how far a fit has come; None outside of a fit. The failure watch calls this function in another
    thread."""
    if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
        return None
    loop = trainer.fit_loop.epoch_loop
    # Lightning declares the type of these trackers with fewer counts than they have
    counts: Any = loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    done = loop.batch_progress.total.completed
    if epochs.ready > epochs.started:  # the counts belong to the previous epoch
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


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer to which the module is attached. None if there is no such Trainer."""
    return module._trainer


def throughputs_of(monitor: ThroughputMonitor) -> Iterable[Throughput]:
    return monitor._throughputs.values()


def copy_of(callback: WeightAveraging | StochasticWeightAveraging) -> torch.nn.Module | None:
    """Return the copy of the module in which a callback averages the weights. None before the callback's
    first fit."""
    found = callback._average_model
    return found.module if isinstance(found, AveragedModel) else found


def update_of(
    callback: WeightAveraging | StochasticWeightAveraging,
) -> Callable[[torch.nn.Module, torch.nn.Module], None]:
    """Return a function of two modules, the average and the current module. The function changes the average
    in place, as the callback does after it has averaged two modules."""
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


def train_loaders(trainer: pl.Trainer) -> tuple[list[Any], str]:
    """Return the loaders of a fit, and how they are combined, such as "max_size_cycle"."""
    combined = trainer.fit_loop._combined_loader
    return ([], "") if combined is None else (list(combined.flattened), combined._mode)


def batches_given(trainer: pl.Trainer) -> list[int | None]:
    """Return how many batches the current iterator of each training loader has given: None for a loader that
    does not count them. The list is empty when no epoch runs."""
    combined = trainer.fit_loop._combined_loader
    running = None if combined is None else combined._iterator
    return [] if running is None else [getattr(each, "_num_yielded", None) for each in running.iterators]


def batches_ahead(trainer: pl.Trainer) -> int:
    """Return how many batches the fit has drawn for later steps."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def draws_ahead(trainer: pl.Trainer) -> bool:
    """Return whether the fit draws each batch before the step of the previous batch, because the number of batches
    is not known."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "prefetch_batches", 0) > 0 and fetcher.length is None


def continue_epoch(trainer: pl.Trainer) -> None:
    """Let a fit that resumes continue the epoch of the checkpoint. Call it before the fit begins its first epoch.

    If an earlier fit resumed from a checkpoint of an epoch's last batch, Lightning counted the next epoch as ended
    while it ran. A fit that resumes in the middle of that epoch would begin the epoch again.
    """
    epochs = trainer.fit_loop.epoch_progress
    current: Any = epochs.current
    total: Any = epochs.total
    if current.ready > current.processed:
        return
    for counts in (current, total):
        counts.ready += 1
        counts.started += 1
    trainer.fit_loop.restarting = True


def begin_next_epoch(trainer: pl.Trainer) -> None:
    """Count the batches of the next epoch from 0, if the fit resumes from a checkpoint that was saved after the
    last batch of an epoch, before the epoch's end. Call it in `on_train_start`.

    Lightning does this only for loaders whose number of batches is known.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    known = trainer.fit_loop.max_batches != float("inf")
    if known or not loop.restarted_on_train_batch_end or not progress.is_last_batch:
        return
    progress.reset_on_run()
    progress.current.completed = -1  # Lightning adds 1 for the last batch
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()


def monitored(module: pl.LightningModule) -> dict[str, torch.Tensor] | None:
    """Return the latest values that the fit's schedulers monitor. None if no scheduler monitors a value, or if the
    module has no Trainer, as in a deep copy of a Trainer."""
    trainer = module._trainer
    names = set() if trainer is None else _monitored_names(trainer)
    values = trainer.callback_metrics if trainer is not None and names else {}
    return {name: values[name].detach().cpu() for name in names & values.keys()} if names else None


def _monitored_names(trainer: pl.Trainer) -> set[str]:
    return {str(each.monitor) for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}


def continue_monitoring(trainer: pl.Trainer, values: Mapping[str, torch.Tensor]) -> None:
    """Let the schedulers that monitor values follow a fit that resumes, as if it had not ended. Call it in
    `on_train_start`.

    Lightning does not update these schedulers at the end of the epoch that resumes. If a checkpoint was saved at the end
    of an epoch, it also leaves out the update of that epoch, because the update follows the save.

    Args:
        values: The values at the checkpoint, as `monitored` returns them.
    """
    loop = trainer.fit_loop
    trainer._logger_connector._callback_metrics.update(values)
    names = _monitored_names(trainer)
    if loop.resumed_on_epoch_end and loop.epoch_loop._num_ready_batches_reached() and names <= values.keys():
        count: Any = loop.epoch_progress.current
        count.completed -= 1  # the index of the epoch that has ended
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        count.completed += 1
    loop._restarting = False


def skips_epoch() -> bool:
    """Return whether the module's `on_train_batch_start` has returned -1 for this batch, so that this process skips
    the rest of its epoch. Call it in the strategy's `on_train_batch_start`."""
    frame = sys._getframe()
    while frame.f_back is not None and "response" not in frame.f_code.co_varnames:
        frame = frame.f_back
    return bool(frame.f_locals.get("response") == -1)


def before_fetches(trainer: pl.Trainer, call: Callable[[], object]) -> None:
    """Call a function before the fit draws a batch, from now on."""
    fetcher: Any = trainer.fit_loop._data_fetcher

    def set_iterator(self: Any, iterator: Iterator[Any] | None) -> None:
        vars(self)["iterator"] = None if iterator is None else _calling(call, iterator)

    kind, current = type(fetcher), fetcher.iterator
    own = property(lambda self: vars(self)["iterator"], set_iterator)
    fetcher.__class__ = type(kind.__name__, (kind,), {"iterator": own})
    fetcher.iterator = current


def _calling(call: Callable[[], object], iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        call()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def without_loader_states(content: Mapping[str, Any]) -> None:
    """Remove the states of loaders from a checkpoint, so that the Trainer does not load them."""
    content.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)


def wrapped_sampler(sampler: object) -> Any | None:
    """Return the user's sampler if Lightning divides its samples over processes; otherwise None."""
    if not is_exactly(sampler, DistributedSamplerWrapper):
        return None
    return sampler.dataset._sampler  # type: ignore[attr-defined]


def wrapped_samples(sampler: Any) -> list[Any]:
    """Return all samples that the user's sampler has given in its current iteration."""
    found: list[Any] = sampler.dataset._sampler_list
    return found
