"""The private names of Lightning that spares need, tested with Lightning 2.6. Each entry says which behavior it relies
on.

- `_SubprocessScriptLauncher`: starts the script once more for each further device of this machine
  (`_call_children_scripts`). `procs` has the processes. The commands are `_basic_subprocess_cmd` or, under hydra,
  `_hydra_subprocess_cmd`. `launch` gets the Trainer's entry point. The fifth argument of a fit's entry point is the path
  of a checkpoint, and the sixth is `weights_only`.
- `_ChildProcessObserver`: a thread that ends all processes if one has failed. It looks from time to time (`_run`).
- `advance` of the loop over batches: draws a batch and trains on it, also on one process.
- `Trainer._teardown`: ends a run.
- `_checkpoint_connector.dump_checkpoint`: the content of a checkpoint.
- `_should_check_val_fx` of the loop over batches: whether a validation is due. After a resume, `advance` first calls it
  for the batch before.
- `_restarting` of the loop over epochs: whether the epoch resumes, so that some schedulers are not updated at its end.
- `_last_global_step_saved`, `_last_checkpoint_saved` and `_defer_save_until_validation` of `ModelCheckpoint`: whether it
  has saved this step. If it has, it does not save the step once more.
- `_collect_rng_states` and `_set_rng_states`: the states of the random numbers of torch, Python and NumPy.
- `_callback_metrics`, `_logged_metrics` and `_progress_bar_metrics` of `_logger_connector`: the latest logged values.
  `_first_loop_iter`: whether this is the first batch of the epoch, so that its values begin new sums; None before it.
- `_results` of the loop over batches: key of a value that the epoch logs -> `_ResultMetric`. It has the `meta` data of
  the call of `log` (`_Metadata`, with a `_Sync`, which reduces the value over processes if `_should` is true). If the
  value is a tensor, its states (`_defaults`) are the sums of the epoch so far: `value`, and for a mean
  `cumulated_batch_size`. Otherwise, `value` is a metric object of the module, at `metric_attribute`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from subprocess import Popen
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import (
    _basic_subprocess_cmd,
    _ChildProcessObserver,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_piper.common.lightning_packages import is_exactly
from lightning_piper.processes.spares import SPARE, SPARES
from lightning_piper.session.metric_objects import add_metric_states
from lightning_piper.strategy.spares.module_state import (
    State,
    dtypes_of,
    restore_beside,
    restore_dtypes,
    state_beside,
)

LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter")
SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
SUMS = ("value", "cumulated_batch_size")
# Variables by which torchrun describes a process. `LightningEnvironment` also reads most of them.
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
               "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


def launching(environment: ClusterEnvironment) -> ClusterEnvironment:
    """Return the environment in which Lightning's launcher starts the processes. If torchrun has started this process
    alone, this is a new one. Then remove torchrun's variables, because they do not describe the other processes."""
    if not is_exactly(environment, TorchElasticEnvironment) or environment.world_size() > 1:
        return environment
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    return LightningEnvironment()


class SpareLauncher(_SubprocessScriptLauncher):
    """A launcher that also starts spares, and lets `run` call the Trainer's entry points.

    Args:
        environment, processes: As for Lightning's launcher.
        spares: Number of spares.
        run: Called with the Trainer, a function that runs its entry point, and the spares. The function takes the path
            of a checkpoint from which a fit continues; None for the user's path, "" for no checkpoint.
        watched: Returns whether another part of this process ends the run if a process fails.

    Attributes:
        waiting: The spares that this process has started.
    """

    def __init__(
        self, environment: ClusterEnvironment, processes: int, spares: int, *calls: Callable[..., Any]
    ) -> None:
        super().__init__(environment, processes, 1)
        self._spares, (self._run, self.watched) = spares, calls
        self.waiting: list[Popen[Any]] = []

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        if not self.cluster_environment.creates_processes_externally:
            os.environ[SPARES] = str(self._spares)
            self._call_children_scripts()
            self._start_spares()
            _Observer(self).start()

        def enter(path: str | None) -> Any:
            return function(*(args if path is None else (*args[:4], path or None, False)), **kwargs)

        return self._run(trainer, enter, self.waiting)

    def _start_spares(self) -> None:
        """Start the spares. Until a spare takes a rank, its script runs as the script of rank 1."""
        hydra = sys.modules.get("hydra.core.hydra_config")
        if hydra is not None and hydra.HydraConfig.initialized():
            command, folder = _hydra_subprocess_cmd(1)
        else:
            command, folder = _basic_subprocess_cmd(), None
        for index in range(self._spares):
            environment = {**os.environ, "LOCAL_RANK": "1", SPARE: str(index)}
            self.waiting.append(Popen(command, env=environment, cwd=folder))


class _Observer(_ChildProcessObserver):
    """Lightning's observer of the processes, which does nothing while the launcher is `watched`."""

    def __init__(self, launcher: SpareLauncher) -> None:
        super().__init__(os.getpid(), launcher.procs)
        self._launcher = launcher

    def _run(self) -> bool:
        return False if self._launcher.watched() else super()._run()


def before_batches(trainer: pl.Trainer, call: Callable[[], object]) -> Callable[[], object]:
    """Call a function before the fit draws each batch. Return a function after which this ends."""
    loop = trainer.fit_loop.epoch_loop
    own = loop.advance

    def calling(fetcher: Any) -> None:
        call()
        own(fetcher)

    vars(loop)["advance"] = calling
    return lambda: vars(loop).pop("advance", None)


def continue_with_batch(trainer: pl.Trainer) -> None:
    """Let a fit that resumes begin with its next batch. If a validation was due after the batch before, Lightning would
    end that batch once more. Call this in `on_train_start`."""
    loop = vars(trainer.fit_loop.epoch_loop)
    # At the end of an epoch that resumes, Lightning does not update schedulers that need metrics.
    trainer.fit_loop._restarting = False
    loop["_should_check_val_fx"] = lambda fetcher: bool(loop.pop("_should_check_val_fx") is None)


def content_of_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the content of a checkpoint of a fit, with everything that a fit needs to resume. Collective."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def outside_checkpoint(trainer: pl.Trainer, gradients: bool) -> State:
    """Return the state of a fit that the next steps need, but that is not in a checkpoint.

    Args:
        trainer: The Trainer.
        gradients: As for `state_beside`.
    """
    callbacks = map(vars, trainer.checkpoint_callbacks)
    return {
        "module": state_beside(trainer.lightning_module, gradients),
        "logged": {name: getattr(trainer._logger_connector, name) for name in LOGGED},
        "epoch": _logged_in_epoch(trainer),
        "saved": [{name: own[name] for name in SAVED if name in own} for own in callbacks],
        "stops": trainer.should_stop,
        "accumulates": trainer.accumulate_grad_batches,
        "random": random_numbers(),
    }


def restore_outside(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Restore the state that `outside_checkpoint` has returned. Call this in `on_train_start`."""
    restore_beside(trainer.lightning_module, state["module"])
    vars(trainer._logger_connector).update(state["logged"])
    _restore_logged_in_epoch(trainer, state["epoch"])
    for each, saved in zip(trainer.checkpoint_callbacks, state["saved"], strict=True):
        vars(each).update(saved)
    trainer.should_stop, trainer.accumulate_grad_batches = state["stops"], state["accumulates"]


def add_lost(trainer: pl.Trainer, state: Mapping[str, Any], lost: Sequence[Mapping[str, Any]]) -> None:
    """Merge `lost`, the states of lost processes that no spare replaces, into `state`: the states of metric objects, and on
    rank 0 the logged values that the processes reduce at the end of the epoch."""
    left, is_first = trainer.world_size, trainer.is_global_zero
    metrics = [each["module"]["metrics"] for each in lost]
    add_metric_states(trainer.lightning_module, state["module"]["metrics"], metrics, left, is_first)
    for key, found in state["epoch"].items() if is_first else ():
        own, sync, sums = found["meta"]["reduce_fx"], found["meta"]["_sync"], found["sums"]
        reduce = own if own in (torch.max, torch.min) else torch.sum
        more = [each["epoch"][key]["sums"] for each in lost if key in each["epoch"]]
        if more and "value" in sums and sync["_should"] and not sync["rank_zero_only"]:
            both = {
                name: reduce(torch.stack([each[name] for each in [sums, *more]]))
                for name in SUMS
                if name in sums
            }
            sums.update({**both, "_computed": None})


def _logged_in_epoch(trainer: pl.Trainer) -> dict[str, State]:
    """Return the values that the epoch has logged so far, without the function that sums a value over processes."""
    found = {}
    for key, each in trainer.fit_loop.epoch_loop._results.items():
        if not each.has_reset:
            meta = {**vars(each.meta), "_sync": {**vars(each.meta.sync), "fn": None, "_fn": None}}
            names = (*each._defaults, "_update_count", "_computed")
            found[key] = {"meta": meta, "sums": {name: getattr(each, name) for name in names}}
    return found


def _restore_logged_in_epoch(trainer: pl.Trainer, state: Mapping[str, State]) -> None:
    results = trainer.fit_loop.epoch_loop._results
    is_distributed: bool = trainer.strategy.is_distributed  # type: ignore[attr-defined]
    results.clear()
    for key, found in state.items():
        sync = {name: x for name, x in found["meta"]["_sync"].items() if name not in ("fn", "_fn")}
        sync["_should"] &= is_distributed  # Lightning does not sync the values of one process
        meta = _Metadata(**{**found["meta"], "_sync": _Sync(fn=trainer.strategy.reduce, **sync)})
        results[key] = each = _ResultMetric(meta, "value" in found["sums"])
        vars(each).update(found["sums"])
        if not each.is_tensor:
            assert meta.metric_attribute is not None  # Lightning knows where the metric object is
            each.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)


def random_numbers() -> State:
    """Return the states of the random numbers of this process."""
    return _collect_rng_states(False)


def restore_random_numbers(state: Mapping[str, Any]) -> None:
    """Restore the states that `random_numbers` has returned."""
    _set_rng_states(dict(state))


class BeforeFit:
    """The state of a process before its first fit. A fit that begins again needs this state."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        # Hooks such as `setup`, which run again, draw the same random numbers again.
        self._random, self._dtypes = random_numbers(), dtypes_of(trainer.lightning_module)
        self._accumulated = trainer.accumulate_grad_batches  # a callback may change it

    def restore(self) -> None:
        restore_random_numbers(self._random)
        restore_dtypes(self._trainer.lightning_module, self._dtypes)
        self._trainer.accumulate_grad_batches = self._accumulated


class WarmedUp(Exception):
    """The warm-up of a spare has captured the step."""


@contextmanager
def warming_up(trainer: pl.Trainer) -> Iterator[None]:
    """Return a context in which a fit, without its sanity check, is a warm-up: its errors have no consequences, and it
    ends with the context."""
    checks, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
    try:
        yield
    except Exception:  # the fit itself raises it again
        pass
    finally:
        trainer.num_sanity_val_steps = checks
    end_fit(trainer)


def end_fit(trainer: pl.Trainer) -> None:
    """End a fit that has failed, so that its entry point can run again."""
    trainer.state.fn, trainer.state.status, trainer.training = TrainerFn.FITTING, TrainerStatus.RUNNING, True
    trainer.should_stop = False
    trainer._teardown()
